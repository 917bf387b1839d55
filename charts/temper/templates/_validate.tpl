{{/* What the schema cannot say. Each message names the value to change. Rendered once, by NOTES.txt and every workload. */}}
{{- define "temper.validate" -}}
{{- $engine := .Values.engine }}
{{- $model := $engine.model }}
{{- if and (not .Values.redis.bundled) (not .Values.redis.external.existingSecret) }}
{{- fail "redis.external.existingSecret is not set: name the Secret that has the URL of your Redis, or set redis.bundled=true" }}
{{- end }}
{{- if not .Values.objectStore.bundled }}
{{- if not .Values.objectStore.external.endpoint }}
{{- fail "objectStore.external.endpoint is not set: give host:port of your S3 server, or set objectStore.bundled=true" }}
{{- end }}
{{- if and (eq .Values.objectStore.external.credentials "secret") (not .Values.objectStore.external.existingSecret) }}
{{- fail "objectStore.external.existingSecret is not set: name the Secret with access-key and secret-key of your S3 server, set objectStore.external.credentials=chain for the identity of the pods, or set objectStore.bundled=true" }}
{{- end }}
{{- end }}
{{- if eq $model.source "claim" }}
{{- if not $model.existingClaim }}
{{- fail "engine.model.existingClaim is not set: name the PersistentVolumeClaim that has the checkpoint, or choose another engine.model.source" }}
{{- end }}
{{- end }}
{{- if eq $model.source "s3" }}
{{- if not $model.s3.uri }}
{{- fail "engine.model.s3.uri is not set: give s3://bucket/prefix of the checkpoint, or choose another engine.model.source" }}
{{- end }}
{{- if and $model.s3.endpoint (eq $model.s3.credentials "secret") (not $model.s3.existingSecret) }}
{{- fail "engine.model.s3.existingSecret is not set: name the Secret with access-key and secret-key for engine.model.s3.endpoint" }}
{{- end }}
{{- end }}
{{- if and (eq $model.source "huggingface") (not $model.huggingface.repository) }}
{{- fail "engine.model.huggingface.repository is not set: give organisation/name of the checkpoint, or choose another engine.model.source" }}
{{- end }}
{{- if and (include "temper.fetchesModel" .) (not $model.digest) }}
{{- fail "engine.model.digest is not set: give what `python -m services.model_source --digest DIR` prints for a good copy, or `unchecked` to take what the source has" }}
{{- end }}
{{- if and (eq $engine.device "cpu") (has $engine.quantization (list "fp8" "int4")) }}
{{- fail "engine.quantization needs a GPU: set it to auto, or engine.device to cuda" }}
{{- end }}
{{- if and (ne $engine.prefillFloat8 "none") (has $engine.quantization (list "fp8" "int4")) }}
{{- fail "engine.prefillFloat8 is for weights that are not quantized: set it to none, or engine.quantization to none" }}
{{- end }}
{{- if and (eq $engine.device "cpu") (ne $engine.kvCacheDtype "auto") }}
{{- fail "engine.kvCacheDtype needs a GPU: set it to auto, or engine.device to cuda" }}
{{- end }}
{{- if and $engine.trainer.webhooks (not $engine.trainer.webhookExistingSecret) }}
{{- fail "engine.trainer.webhookExistingSecret is not set: name the Secret with the `secret` that signs requests to engine.trainer.webhooks" }}
{{- end }}
{{- if and $engine.autoscaling.enabled (eq $engine.autoscaling.scaler "hpa") (eq (int $engine.autoscaling.minReplicas) 0) }}
{{- fail "engine.autoscaling.minReplicas is 0, to which a HorizontalPodAutoscaler does not scale: set engine.autoscaling.scaler to keda, or engine.autoscaling.minReplicas to 1" }}
{{- end }}
{{- if and $engine.autoscaling.enabled (gt (int $engine.autoscaling.minReplicas) (int $engine.autoscaling.maxReplicas)) }}
{{- fail "engine.autoscaling.minReplicas is over engine.autoscaling.maxReplicas" }}
{{- end }}
{{- if and .Values.gateway.autoscaling.enabled (gt (int .Values.gateway.autoscaling.minReplicas) (int .Values.gateway.autoscaling.maxReplicas)) }}
{{- fail "gateway.autoscaling.minReplicas is over gateway.autoscaling.maxReplicas" }}
{{- end }}
{{- if and .Values.gateway.httpRoute.enabled (not .Values.gateway.httpRoute.parentRefs) }}
{{- fail "gateway.httpRoute.parentRefs is empty: name the Gateway that the route belongs to" }}
{{- end }}
{{- if and .Values.telemetry.headersExistingSecret (not .Values.telemetry.otlpEndpoint) }}
{{- fail "telemetry.headersExistingSecret does nothing without telemetry.otlpEndpoint" }}
{{- end }}
{{- if .Values.tls.enabled }}
{{- if ne (empty .Values.tls.gatewayExistingSecret) (empty .Values.tls.engineExistingSecret) }}
{{- fail "tls.gatewayExistingSecret and tls.engineExistingSecret: name both Secrets, or none to have cert-manager make them" }}
{{- end }}
{{- end }}
{{- include "temper.validateClaim" . }}
{{- include "temper.validateImages" . }}
{{- include "temper.validateExposure" . }}
{{- include "temper.validatePool" . }}
{{- include "temper.validateStores" . }}
{{- include "temper.validateSizes" . }}
{{- end }}

{{/* Engines that mount one claim, on several nodes: all but the first would stay pending. What the cluster says of the
     claim counts, and what a value says where no cluster is seen. */}}
{{- define "temper.validateClaim" -}}
{{- $engine := .Values.engine }}
{{- $model := $engine.model }}
{{- $value := ternary "existingClaim" "sharedClaim" (eq $model.source "claim") }}
{{- $claim := ternary $model.existingClaim (ternary $model.sharedClaim "" (eq (include "temper.fetchesModel" .) "true")) (eq $model.source "claim") }}
{{- $most := include "temper.mostEngines" . | int }}
{{- if and $claim (gt $most 1) (not (hasKey $engine.nodeSelector "kubernetes.io/hostname")) }}
{{- $fit := ternary (list "ReadOnlyMany" "ReadWriteMany") (list "ReadWriteMany") (eq $model.source "claim") }}
{{- $found := lookup "v1" "PersistentVolumeClaim" .Release.Namespace $claim | default dict }}
{{- $modes := dig "spec" "accessModes" list $found | default (compact (list $model.claimAccessMode)) }}
{{- $enough := false }}
{{- range $modes }}
{{- $enough = or $enough (has . $fit) }}
{{- end }}
{{- if not $enough }}
{{- $known := ternary (printf "is %s" (join ", " $modes)) "is not known (engine.model.claimAccessMode is empty, and no cluster that has it was asked)" (gt (len $modes) 0) }}
{{- fail (printf "engine.model.%s (%s) is to be mounted by %d engines, and its access mode %s: %s lets engines on several nodes do that. Make such a claim and say so in engine.model.claimAccessMode; or put all engines on one node with engine.nodeSelector (kubernetes.io/hostname); or have one engine (engine.replicas, engine.autoscaling.maxReplicas)" $value $claim $most $known (join " or " $fit)) }}
{{- end }}
{{- end }}
{{- end }}

{{/* No image is published. Without a registry a name is Docker Hub's, of whoever owns the namespace there. */}}
{{- define "temper.validateImages" -}}
{{- range $part := list "gateway" "engine" }}
{{- $image := (index $.Values $part).image }}
{{- if not (or $.Values.global.imageRegistry $image.registry $image.digest (eq $image.pullPolicy "Never")) }}
{{- fail (printf "%s.image.registry is empty, and no image of Temper is published: build it and push it to a registry of yours (docs/guides/images.md), then set %s.image.registry or global.imageRegistry; with images that are on the nodes already set %s.image.pullPolicy=Never" $part $part $part) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Who reaches a gateway without keys may do everything. */}}
{{- define "temper.validateExposure" -}}
{{- $gateway := .Values.gateway }}
{{- if not (or $gateway.apiKeys.existingSecret $gateway.apiKeys.allowNone) }}
{{- if ne $gateway.service.type "ClusterIP" }}
{{- fail (printf "gateway.service.type is %s and gateway.apiKeys.existingSecret is not set: whoever reaches the gateway could do everything. Name the Secret with the keys, or set gateway.apiKeys.allowNone=true if that is meant" $gateway.service.type) }}
{{- end }}
{{- if $gateway.ingress.enabled }}
{{- fail "gateway.ingress.enabled is true and gateway.apiKeys.existingSecret is not set: whoever reaches the gateway could do everything. Name the Secret with the keys, or set gateway.apiKeys.allowNone=true if that is meant" }}
{{- end }}
{{- if $gateway.httpRoute.enabled }}
{{- fail "gateway.httpRoute.enabled is true and gateway.apiKeys.existingSecret is not set: whoever reaches the gateway could do everything. Name the Secret with the keys, or set gateway.apiKeys.allowNone=true if that is meant" }}
{{- end }}
{{- end }}
{{- if and $gateway.apiKeys.existingSecret .Values.test.enabled (not .Values.test.apiKeyExistingSecret) }}
{{- fail "test.apiKeyExistingSecret is not set, and the gateway asks for keys (gateway.apiKeys.existingSecret): name the Secret with the `api-key` of `helm test`, or set test.enabled=false" }}
{{- end }}
{{- end }}

{{- define "temper.validatePool" -}}
{{- $pool := .Values.inferencePool }}
{{- if $pool.enabled }}
{{- if not .Values.engine.http.enabled }}
{{- fail "inferencePool.enabled is true and engine.http.enabled is not: the pool's requests are for the gateway in each engine's pod. Set engine.http.enabled=true" }}
{{- end }}
{{- if not $pool.endpointPicker.service }}
{{- fail "inferencePool.endpointPicker.service is not set: name the Service of your endpoint picker (docs/guides/routers.md)" }}
{{- end }}
{{- if $pool.httpRoute.enabled }}
{{- if not $pool.httpRoute.parentRefs }}
{{- fail "inferencePool.httpRoute.parentRefs is empty: name the Gateway that the route belongs to" }}
{{- end }}
{{- if not (or .Values.gateway.apiKeys.existingSecret .Values.gateway.apiKeys.allowNone) }}
{{- fail "inferencePool.httpRoute.enabled is true and gateway.apiKeys.existingSecret is not set: whoever reaches the route could do everything that its paths do. Name the Secret with the keys, or set gateway.apiKeys.allowNone=true if that is meant" }}
{{- end }}
{{- end }}
{{- else if $pool.httpRoute.enabled }}
{{- fail "inferencePool.httpRoute.enabled does nothing without inferencePool.enabled" }}
{{- else if $pool.objectives }}
{{- fail "inferencePool.objectives do nothing without inferencePool.enabled" }}
{{- end }}
{{- end }}

{{- define "temper.validateStores" -}}
{{- if not .Values.global.generateSecrets }}
{{- if and .Values.redis.bundled (not .Values.redis.existingSecret) }}
{{- fail "redis.existingSecret is not set, and global.generateSecrets is false: name the Secret with the `password` of the bundled Redis" }}
{{- end }}
{{- if and .Values.objectStore.bundled (not .Values.objectStore.existingSecret) }}
{{- fail "objectStore.existingSecret is not set, and global.generateSecrets is false: name the Secret with `access-key`, `secret-key`, `tls.crt` and `tls.key` of the bundled object store" }}
{{- end }}
{{- end }}
{{- if and .Values.redis.existingSecret (not .Values.redis.bundled) }}
{{- fail "redis.existingSecret is of the bundled Redis, and redis.bundled is false: name the Secret in redis.external.existingSecret" }}
{{- end }}
{{- if and .Values.objectStore.existingSecret (not .Values.objectStore.bundled) }}
{{- fail "objectStore.existingSecret is of the bundled object store, and objectStore.bundled is false: name the Secret in objectStore.external.existingSecret" }}
{{- end }}
{{- if and (not .Values.objectStore.bundled) (eq .Values.objectStore.external.credentials "chain") .Values.objectStore.external.existingSecret }}
{{- fail "objectStore.external.existingSecret does nothing with objectStore.external.credentials=chain: set one of them" }}
{{- end }}
{{- if and (eq .Values.engine.model.s3.credentials "chain") .Values.engine.model.s3.existingSecret }}
{{- fail "engine.model.s3.existingSecret does nothing with engine.model.s3.credentials=chain: set one of them" }}
{{- end }}
{{- end }}

{{/* Sizes that cannot both be. */}}
{{- define "temper.validateSizes" -}}
{{- $engine := .Values.engine }}
{{- $tiers := $engine.tiers }}
{{- range $path, $resources := dict "gateway" .Values.gateway.resources "engine" $engine.resources "engine.http" $engine.http.resources "redis" .Values.redis.resources "objectStore" .Values.objectStore.resources "test" .Values.test.resources }}
{{- range $name, $request := $resources.requests }}
{{- $limit := index $resources.limits $name }}
{{- if and $limit (gt (include "temper.number" $request | float64) (include "temper.number" $limit | float64)) }}
{{- fail (printf "%s.resources.requests.%s (%s) is over %s.resources.limits.%s (%s)" $path $name $request $path $name $limit) }}
{{- end }}
{{- end }}
{{- end }}
{{- $memory := $engine.resources.limits.memory }}
{{- if and $tiers.hostBytes (contains "host" $tiers.names) (ge (include "temper.number" $tiers.hostBytes | float64) (include "temper.number" $memory | float64)) }}
{{- fail (printf "engine.tiers.hostBytes (%s) does not fit into engine.resources.limits.memory (%s), which has the engine itself to hold as well" $tiers.hostBytes $memory) }}
{{- end }}
{{- if and (contains "disk" $tiers.names) $tiers.diskPersistent (ge (include "temper.number" $tiers.diskBytes | float64) (include "temper.number" $engine.persistence.size | float64)) }}
{{- fail (printf "engine.tiers.diskBytes (%s) does not fit into engine.persistence.size (%s), which has kernels, checkpoints and the model to hold as well" $tiers.diskBytes $engine.persistence.size) }}
{{- end }}
{{- $storage := index $engine.resources.limits "ephemeral-storage" }}
{{- if and (contains "disk" $tiers.names) (not $tiers.diskPersistent) $storage (ge (include "temper.number" $tiers.diskBytes | float64) (include "temper.number" $storage | float64)) }}
{{- fail (printf "engine.tiers.diskBytes (%s) does not fit into engine.resources.limits.ephemeral-storage (%s): the node would end the engine" $tiers.diskBytes $storage) }}
{{- end }}
{{- if and (contains "store" $tiers.names) .Values.objectStore.bundled (ge (include "temper.number" $tiers.storeBytes | float64) (include "temper.number" .Values.objectStore.persistence.size | float64)) }}
{{- fail (printf "engine.tiers.storeBytes (%s) does not fit into objectStore.persistence.size (%s), which has adapters and files to hold as well" $tiers.storeBytes .Values.objectStore.persistence.size) }}
{{- end }}
{{- $autoscaling := $engine.autoscaling }}
{{- if and $autoscaling.enabled (gt (int $autoscaling.fallback.replicas) (int $autoscaling.maxReplicas)) }}
{{- fail "engine.autoscaling.fallback.replicas is over engine.autoscaling.maxReplicas" }}
{{- end }}
{{- end }}
