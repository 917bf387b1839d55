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

{{/* Parts are dict "root" $ "part" NAME "values" of the part. Metadata of their pods: no label that changes with the chart's
     version, or each version would restart every pod; "config" is the text whose change has to. "labels" are more, which
     the values' own go before. */}}
{{- define "temper.podMeta" -}}
labels:
  {{- include "temper.selector" . | nindent 2 }}
  {{- with merge (dict) .values.podLabels (default dict .labels) }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if or .config .values.podAnnotations }}
annotations:
  {{- with .config }}
  checksum/config: {{ sha256sum . }}
  {{- end }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* What all pods say first: a part and "uid". */}}
{{- define "temper.podSpec" -}}
serviceAccountName: {{ include "temper.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- include "temper.pullSecrets" .root }}
{{- include "temper.priorityClass" . }}
securityContext:
  {{- include "temper.podSecurity" . | nindent 2 }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $.values $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* Pod Security Standards, restricted, under what the values say. OpenShift gives each namespace users and groups of its
     own, and takes no others. */}}
{{- define "temper.podSecurity" -}}
{{- $context := dict "runAsNonRoot" true "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault") }}
{{- if not .root.Values.global.openshift }}
{{- $context = merge $context (dict "runAsUser" .uid "runAsGroup" .uid "fsGroup" .uid) }}
{{- end }}
{{- toYaml (mergeOverwrite $context (deepCopy .values.podSecurityContext)) }}
{{- end }}

{{- define "temper.containerSecurity" -}}
{{- $context := dict "allowPrivilegeEscalation" false "privileged" false "readOnlyRootFilesystem" true "runAsNonRoot" true "capabilities" (dict "drop" (list "ALL")) "seccompProfile" (dict "type" "RuntimeDefault") }}
{{- toYaml (mergeOverwrite $context (deepCopy .values.securityContext)) }}
{{- end }}

{{- define "temper.serviceAccount" -}}
{{- if .root.Values.serviceAccount.create }}{{ include "temper.fullname" .root }}-{{ .part }}{{ else }}{{ .root.Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "temper.priorityClass" -}}
{{- if .values.priorityClassName }}
priorityClassName: {{ .values.priorityClassName }}
{{- else if and .root.Values.priorityClasses.create (has .part (list "gateway" "engine")) }}
priorityClassName: {{ include "temper.fullname" .root }}-{{ .part }}
{{- end }}
{{- end }}

{{- define "temper.spread" -}}
{{- $own := .values.topologySpreadConstraints }}
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

{{/* Entries of env: the values' own (env, and env of the part) among the chart's, which may not be said twice; then what
     leads out of the cluster, and extraEnv. A part with "env" (dict NAME value). */}}
{{- define "temper.env" -}}
{{- $env := .env }}
{{- $fixed := concat (keys .env) (list "TEMPER_REDIS_URL" "TEMPER_S3_ACCESS_KEY" "TEMPER_S3_SECRET_KEY" "TEMPER_OTLP_HEADERS" "TEMPER_REWARD_WEBHOOK_SECRET" "TEMPER_TARGET_KEYS" "TEMPER_CA_BUNDLE") }}
{{- range $name, $value := merge (dict) .values.env .root.Values.env }}
{{- if has $name $fixed }}
{{- fail (printf "env.%s is set by the chart: use its value instead (helm show values)" $name) }}
{{- end }}
{{- $_ := set $env $name $value }}
{{- end }}
{{- range .values.extraEnv }}
{{- if or (has .name $fixed) (hasKey $env .name) }}
{{- fail (printf "extraEnv: %s is set by the chart or by env already: use its value instead (helm show values)" .name) }}
{{- end }}
{{- end }}
{{- $proxy := .root.Values.proxy }}
{{- if or $proxy.http $proxy.https }}
{{- range $name, $url := dict "HTTP_PROXY" $proxy.http "HTTPS_PROXY" $proxy.https }}
{{- if $url }}
{{- $_ := set $env $name $url }}
{{- end }}
{{- end }}
{{- $_ := set $env "NO_PROXY" (concat (list "localhost" "127.0.0.1" ".svc" ".cluster.local") $proxy.noProxy | join ",") }}
{{- end }}
{{- if .root.Values.caBundle.configMap }}
{{- $_ := set $env "TEMPER_CA_BUNDLE" (printf "/etc/temper/ca/%s" .root.Values.caBundle.key) }}
{{- end }}
{{- range $name, $value := $env }}
- name: {{ $name }}
  value: {{ include "temper.text" $value | quote }}
{{- end }}
{{- with .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Beside env, and volumes that every container of gateway and engine has. */}}
{{- define "temper.envFrom" -}}
{{- with .values.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "temper.extraMounts" -}}
{{- if .root.Values.caBundle.configMap }}
- name: ca-bundle
  mountPath: /etc/temper/ca
  readOnly: true
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Once in each pod of gateways and engines. */}}
{{- define "temper.caVolume" -}}
{{- with .Values.caBundle }}
{{- if .configMap }}
- name: ca-bundle
  configMap:
    name: {{ .configMap }}
    items:
      - {key: {{ .key }}, path: {{ .key }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "temper.extraVolumes" -}}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The files of mTLS: a part, whose "volumes" its volume's name begins with. */}}
{{- define "temper.tlsMount" -}}
{{- if .root.Values.tls.enabled }}
- name: {{ .volumes }}tls
  mountPath: /etc/temper/tls
  readOnly: true
{{- end }}
{{- end }}

{{- define "temper.tlsVolume" -}}
{{- if .root.Values.tls.enabled }}
- name: {{ .volumes }}tls
  secret:
    secretName: {{ include "temper.tlsSecret" . }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{/* A volume of each pod of a StatefulSet: a part with "name" and "persistence". */}}
{{- define "temper.claimTemplate" -}}
- apiVersion: v1
  kind: PersistentVolumeClaim
  metadata:
    name: {{ .name }}
    labels:
      {{- include "temper.selector" . | nindent 6 }}
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .persistence.storageClassName }}
    storageClassName: {{ . }}
    {{- end }}
    resources:
      requests:
        storage: {{ .persistence.size }}
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
{{- $_ := set $env "TEMPER_S3_ENDPOINT" (printf "%s-s3.%s.svc:9000" (include "temper.fullname" .) .Release.Namespace) }}
{{- $_ := set $env "TEMPER_S3_SECURE" "false" }}
{{- else }}
{{- $_ := set $env "TEMPER_S3_ENDPOINT" $values.objectStore.external.endpoint }}
{{- $_ := set $env "TEMPER_S3_SECURE" $values.objectStore.external.secure }}
{{- $_ := set $env "TEMPER_S3_REGION" $values.objectStore.external.region }}
{{- if eq $values.objectStore.external.credentials "chain" }}
{{- $_ := set $env "TEMPER_S3_CREDENTIALS" "chain" }}
{{- end }}
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

{{/* Credentials of an S3 server: dict "prefix" "TEMPER_S3" "secret" NAME; no Secret, nothing. */}}
{{- define "temper.s3Credentials" -}}
{{- if .secret }}
{{- include "temper.secretEnv" (dict "name" (printf "%s_ACCESS_KEY" .prefix) "secret" .secret "key" "access-key") }}
{{ include "temper.secretEnv" (dict "name" (printf "%s_SECRET_KEY" .prefix) "secret" .secret "key" "secret-key") }}
{{- end }}
{{- end }}

{{- define "temper.sharedSecretEnv" -}}
{{- $redis := include "temper.redisSecret" . }}
{{- if .Values.redis.bundled }}
{{- include "temper.secretEnv" (dict "name" "REDIS_PASSWORD" "secret" $redis "key" "password") }}
- name: TEMPER_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "temper.fullname" . }}-redis.{{ .Release.Namespace }}.svc:6379/0
{{- else }}
{{- include "temper.secretEnv" (dict "name" "TEMPER_REDIS_URL" "secret" $redis "key" .Values.redis.external.key) }}
{{- end }}
{{- with include "temper.s3Credentials" (dict "prefix" "TEMPER_S3" "secret" (include "temper.objectStoreSecret" .)) }}
{{ . }}
{{- end }}
{{- with .Values.telemetry.headersExistingSecret }}
{{ include "temper.secretEnv" (dict "name" "TEMPER_OTLP_HEADERS" "secret" . "key" "headers") }}
{{- end }}
{{- end }}

{{- define "temper.redisSecret" -}}
{{- if .Values.redis.bundled }}{{ default (printf "%s-redis" (include "temper.fullname" .)) .Values.redis.existingSecret }}{{ else }}{{ .Values.redis.external.existingSecret }}{{ end }}
{{- end }}

{{/* Empty: the pods' own identity. */}}
{{- define "temper.objectStoreSecret" -}}
{{- if .Values.objectStore.bundled }}{{ default (printf "%s-s3" (include "temper.fullname" .)) .Values.objectStore.existingSecret }}{{ else if eq .Values.objectStore.external.credentials "secret" }}{{ .Values.objectStore.external.existingSecret }}{{ end }}
{{- end }}

{{- define "temper.tlsSecret" -}}
{{- $given := index .root.Values.tls (printf "%sExistingSecret" .part) }}
{{- default (printf "%s-%s-tls" (include "temper.fullname" .root) .part) $given }}
{{- end }}

{{- define "temper.tlsServerName" -}}
{{- default (printf "%s-engine.%s.svc" (include "temper.fullname" .) .Release.Namespace) .Values.tls.serverName }}
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

{{/* As many engines as there may be. */}}
{{- define "temper.mostEngines" -}}
{{- ternary .Values.engine.autoscaling.maxReplicas .Values.engine.replicas .Values.engine.autoscaling.enabled | int }}
{{- end }}

{{/* A quantity of Kubernetes as a number: "2Gi" 2147483648, "500m" 0.5. */}}
{{- define "temper.number" -}}
{{- $text := include "temper.text" . }}
{{- $unit := regexFind "[A-Za-z]+$" $text }}
{{- $factors := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 }}
{{- mulf (trimSuffix $unit $text | float64) (index $factors $unit) | printf "%.3f" }}
{{- end }}

{{/* How long running responses may go on after SIGTERM: as long as a request may last, if nothing is said. */}}
{{- define "temper.gatewayDrain" -}}
{{- .Values.gateway.shutdownGraceSeconds | toString | default (.Values.gateway.requestTimeoutSeconds | toString) | float64 | ceil | int }}
{{- end }}

{{- define "temper.engineDrain" -}}
{{- .Values.engine.drainSeconds | toString | default (.Values.gateway.requestTimeoutSeconds | toString) | float64 | ceil | int }}
{{- end }}

{{/* SIGTERM to SIGKILL: services/gateway/settings.py and services/engine/settings.py, termination_seconds, and 10 for
     what is not in them. */}}
{{- define "temper.gatewayTermination" -}}
{{- add (ceil .Values.gateway.drainDelaySeconds) (include "temper.gatewayDrain" .) 15 }}
{{- end }}

{{- define "temper.engineTermination" -}}
{{- $own := add (max (include "temper.engineDrain" .) (ceil .Values.engine.trainer.drainSeconds)) 15 }}
{{- if .Values.engine.http.enabled }}
{{- max (add $own (include "temper.engineDelay" .)) (include "temper.gatewayTermination" .) }}
{{- else }}
{{- $own }}
{{- end }}
{{- end }}

{{/* How much later than the gateway beside it an engine hears that it ends: it serves as long as that one accepts. */}}
{{- define "temper.engineDelay" -}}
{{- add (ceil .Values.gateway.drainDelaySeconds) 1 }}
{{- end }}
