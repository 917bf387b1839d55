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
{{- if not .Values.objectStore.external.existingSecret }}
{{- fail "objectStore.external.existingSecret is not set: name the Secret with access-key and secret-key of your S3 server, or set objectStore.bundled=true" }}
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
{{- if and $model.s3.endpoint (not $model.s3.existingSecret) }}
{{- fail "engine.model.s3.existingSecret is not set: name the Secret with access-key and secret-key for engine.model.s3.endpoint" }}
{{- end }}
{{- end }}
{{- if and (eq $model.source "huggingface") (not $model.huggingface.repository) }}
{{- fail "engine.model.huggingface.repository is not set: give organisation/name of the checkpoint, or choose another engine.model.source" }}
{{- end }}
{{- if and (include "temper.fetchesModel" .) (not $model.digest) }}
{{- fail "engine.model.digest is not set: give what `python -m services.model_source --digest DIR` prints for a good copy, or `unchecked` to take what the source has" }}
{{- end }}
{{- if and (eq $engine.device "cpu") (ne $engine.quantization "none") }}
{{- fail "engine.quantization needs a GPU: set it to none, or engine.device to cuda" }}
{{- end }}
{{- if and (eq $engine.device "cpu") (ne $engine.kvCacheDtype "auto") }}
{{- fail "engine.kvCacheDtype needs a GPU: set it to auto, or engine.device to cuda" }}
{{- end }}
{{- if and $engine.trainer.webhooks (not $engine.trainer.webhookExistingSecret) }}
{{- fail "engine.trainer.webhookExistingSecret is not set: name the Secret with the `secret` that signs requests to engine.trainer.webhooks" }}
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
{{- end }}
