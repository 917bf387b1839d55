{{- define "temper.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* 40 characters: the longest suffix has to fit a label, too. */}}
{{- define "temper.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "temper.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "temper.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* What a part is selected by: dict "root" $ "part" "gateway". */}}
{{- define "temper.selector" -}}
app.kubernetes.io/name: {{ include "temper.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "temper.labels" -}}
{{ include "temper.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* A reference that names one image for good: dict "root" $ "image" .Values.gateway.image. */}}
{{- define "temper.image" -}}
{{- $registry := default .image.registry .root.Values.global.imageRegistry }}
{{- $name := ternary (printf "%s/%s" $registry .image.repository) .image.repository (ne $registry "") }}
{{- if .image.digest }}
{{- printf "%s@%s" $name .image.digest }}
{{- else }}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion .image.tag) }}
{{- end }}
{{- end }}

{{- define "temper.pullSecrets" -}}
{{- with .Values.global.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Pod Security Standards, restricted: dict "uid" 10001. */}}
{{- define "temper.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .uid }}
runAsGroup: {{ .uid }}
fsGroup: {{ .uid }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "temper.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "temper.serviceAccount" -}}
{{- if .root.Values.serviceAccount.create }}{{ include "temper.fullname" .root }}-{{ .part }}{{ else }}{{ .root.Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "temper.priorityClass" -}}
{{- $own := (index .root.Values .part).priorityClassName }}
{{- if $own }}
priorityClassName: {{ $own }}
{{- else if .root.Values.priorityClasses.create }}
priorityClassName: {{ include "temper.fullname" .root }}-{{ .part }}
{{- end }}
{{- end }}

{{- define "temper.spread" -}}
{{- $own := (index .root.Values .part).topologySpreadConstraints }}
topologySpreadConstraints:
{{- if $own }}
{{- toYaml $own | nindent 2 }}
{{- else }}
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "temper.selector" $ | nindent 8 }}
{{- end }}
{{- end }}
{{- end }}

{{/* A number of values.yaml as an environment has it: no exponents. */}}
{{- define "temper.text" -}}
{{- if and (kindIs "float64" .) (eq (float64 (int64 .)) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* Entries of env, sorted, the values' own (env, and env of the part) among the chart's, which may not be said twice:
     dict "root" $ "part" "gateway" "env" (dict NAME value). */}}
{{- define "temper.env" -}}
{{- $env := .env }}
{{- $fixed := concat (keys .env) (list "TEMPER_REDIS_URL" "TEMPER_S3_ACCESS_KEY" "TEMPER_S3_SECRET_KEY" "TEMPER_OTLP_HEADERS" "TEMPER_REWARD_WEBHOOK_SECRET") }}
{{- range $name, $value := merge (dict) (index .root.Values .part).env .root.Values.env }}
{{- if has $name $fixed }}
{{- fail (printf "env.%s is set by the chart: use its value instead (helm show values)" $name) }}
{{- end }}
{{- $_ := set $env $name $value }}
{{- end }}
{{- range $name, $value := $env }}
- name: {{ $name }}
  value: {{ include "temper.text" $value | quote }}
{{- end }}
{{- end }}

{{- define "temper.secretEnv" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret }}
      key: {{ .key }}
{{- end }}

{{/* What gateway and engine share. */}}
{{- define "temper.sharedEnv" -}}
{{- $values := .Values }}
{{- $env := dict "TEMPER_SERVED_MODEL_NAME" $values.engine.servedModelName "TEMPER_S3_BUCKET" $values.objectStore.bucket }}
{{- if $values.objectStore.bundled }}
{{- $_ := set $env "TEMPER_S3_ENDPOINT" (printf "%s-minio.%s.svc:9000" (include "temper.fullname" .) .Release.Namespace) }}
{{- $_ := set $env "TEMPER_S3_SECURE" "false" }}
{{- else }}
{{- $_ := set $env "TEMPER_S3_ENDPOINT" $values.objectStore.external.endpoint }}
{{- $_ := set $env "TEMPER_S3_SECURE" $values.objectStore.external.secure }}
{{- $_ := set $env "TEMPER_S3_REGION" $values.objectStore.external.region }}
{{- end }}
{{- if $values.tls.enabled }}
{{- $_ := set $env "TEMPER_GRPC_TLS_CERT" "/etc/temper/tls/tls.crt" }}
{{- $_ := set $env "TEMPER_GRPC_TLS_KEY" "/etc/temper/tls/tls.key" }}
{{- $_ := set $env "TEMPER_GRPC_TLS_CA" "/etc/temper/tls/ca.crt" }}
{{- end }}
{{- if $values.telemetry.otlpEndpoint }}
{{- $_ := set $env "TEMPER_OTLP_ENDPOINT" $values.telemetry.otlpEndpoint }}
{{- $_ := set $env "TEMPER_TRACE_RATIO" $values.telemetry.traceRatio }}
{{- end }}
{{- toJson $env }}
{{- end }}

{{- define "temper.sharedSecretEnv" -}}
{{ include "temper.secretEnv" (dict "name" "TEMPER_REDIS_URL" "secret" (include "temper.redisSecret" .) "key" (ternary "url" .Values.redis.external.key .Values.redis.bundled)) }}
{{ include "temper.secretEnv" (dict "name" "TEMPER_S3_ACCESS_KEY" "secret" (include "temper.objectStoreSecret" .) "key" "access-key") }}
{{ include "temper.secretEnv" (dict "name" "TEMPER_S3_SECRET_KEY" "secret" (include "temper.objectStoreSecret" .) "key" "secret-key") }}
{{- with .Values.telemetry.headersExistingSecret }}
{{ include "temper.secretEnv" (dict "name" "TEMPER_OTLP_HEADERS" "secret" . "key" "headers") }}
{{- end }}
{{- end }}

{{- define "temper.redisSecret" -}}
{{- if .Values.redis.bundled }}{{ include "temper.fullname" . }}-redis{{ else }}{{ .Values.redis.external.existingSecret }}{{ end }}
{{- end }}

{{- define "temper.objectStoreSecret" -}}
{{- if .Values.objectStore.bundled }}{{ include "temper.fullname" . }}-minio{{ else }}{{ .Values.objectStore.external.existingSecret }}{{ end }}
{{- end }}

{{- define "temper.tlsSecret" -}}
{{- $given := index .root.Values.tls (printf "%sExistingSecret" .part) }}
{{- default (printf "%s-%s-tls" (include "temper.fullname" .root) .part) $given }}
{{- end }}

{{- define "temper.tlsServerName" -}}
{{- default (printf "%s-engine.%s.svc" (include "temper.fullname" .) .Release.Namespace) .Values.tls.serverName }}
{{- end }}

{{/* A password that stays when the release is upgraded: dict "root" $ "secret" name "key" key. Without a cluster to look
     into (helm template) it is another one each time. */}}
{{- define "temper.keptPassword" -}}
{{- $old := lookup "v1" "Secret" .root.Release.Namespace .secret }}
{{- if and $old $old.data (hasKey $old.data .key) }}{{ index $old.data .key | b64dec }}{{ else }}{{ randAlphaNum 32 }}{{ end }}
{{- end }}

{{/* Where engines keep the checkpoint. */}}
{{- define "temper.modelPath" -}}
{{- $model := .Values.engine.model }}
{{- if eq $model.source "image" }}/app/models/tiny
{{- else if eq $model.source "claim" }}{{ printf "/models/%s" $model.path | trimSuffix "/" }}
{{- else }}/models/checkpoint
{{- end }}
{{- end }}

{{- define "temper.fetchesModel" -}}
{{- if has .Values.engine.model.source (list "s3" "huggingface") }}true{{ end }}
{{- end }}

{{/* SIGTERM to SIGKILL: services/gateway/settings.py and services/engine/settings.py, termination_seconds, and 10 for
     what is not in them. */}}
{{- define "temper.gatewayTermination" -}}
{{- add (ceil .Values.gateway.drainDelaySeconds) (ceil .Values.gateway.shutdownGraceSeconds) 15 }}
{{- end }}

{{- define "temper.engineTermination" -}}
{{- add (max (ceil .Values.engine.drainSeconds) (ceil .Values.engine.trainer.drainSeconds)) 15 }}
{{- end }}
