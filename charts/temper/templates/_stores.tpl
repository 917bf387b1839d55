{{/* The credentials of a bundled store, unless a Secret that exists is named: a part with "name", "existing" and "keys";
     "certificate": with tls.crt and tls.key as well. */}}
{{- define "temper.bundledSecret" -}}
{{- if not .existing }}
apiVersion: v1
kind: Secret
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "temper.labels" . | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep
type: Opaque
stringData:
  {{- range $key := .keys }}
  {{ $key }}: {{ include "temper.keptPassword" (dict "root" $.root "secret" $.name "key" $key) }}
  {{- end }}
  {{- if .certificate }}
  {{- include "temper.keptCertificate" (dict "root" .root "secret" .name) | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* A password that stays when the release is upgraded: dict "root" $ "secret" name "key" key. Without a cluster to look
     into (helm template) it is another one each time, which generateSecrets=false makes an error. */}}
{{- define "temper.keptPassword" -}}
{{- $old := lookup "v1" "Secret" .root.Release.Namespace .secret }}
{{- if and $old $old.data (hasKey $old.data .key) }}{{ index $old.data .key | b64dec }}{{ else }}{{ randAlphaNum 32 }}{{ end }}
{{- end }}

{{/* A certificate that signed itself, and its key, which stay in the same way: dict "root" $ "secret" name. What has both
     knows the others of its pod by it, and nobody else has it: authority, server's and client's in one. */}}
{{- define "temper.keptCertificate" -}}
{{- $old := lookup "v1" "Secret" .root.Release.Namespace .secret }}
{{- if and $old $old.data (hasKey $old.data "tls.crt") (hasKey $old.data "tls.key") }}
tls.crt: {{ index $old.data "tls.crt" | b64dec | toJson }}
tls.key: {{ index $old.data "tls.key" | b64dec | toJson }}
{{- else }}
{{- $drawn := genCAWithKey .secret 3650 (genPrivateKey "ecdsa") }}
tls.crt: {{ $drawn.Cert | toJson }}
tls.key: {{ $drawn.Key | toJson }}
{{- end }}
{{- end }}

{{/* Spec of the StatefulSet of a store: a part. */}}
{{- define "temper.oneOfAKind" -}}
replicas: 1
revisionHistoryLimit: 3
persistentVolumeClaimRetentionPolicy:
  whenDeleted: Retain
  whenScaled: Retain
selector:
  matchLabels:
    {{- include "temper.selector" . | nindent 4 }}
{{- end }}

{{/* The same as `temper up` gives its server. Jobs are never evicted: full, it refuses writes. Seven tenths, as what
     clients and the rewriting of the file need comes on top of the data. */}}
{{- define "temper.valkeyConfig" -}}
bind * -::*
port 6379
dir /data
appendonly yes
appendfsync everysec
aof-timestamp-enabled yes
save ""
maxmemory {{ mulf 0.7 (include "temper.number" .Values.redis.resources.limits.memory | float64) | int64 }}
maxmemory-policy noeviction
{{- end }}
