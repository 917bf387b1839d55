{{/* Of a pod of the release. */}}
{{- define "temper.peer" -}}
- podSelector:
    matchLabels:
      {{- include "temper.selector" . | nindent 6 }}
{{- end }}
{{/* The port that a URL or host:port names: dict "url" … "default" 443. */}}
{{- define "temper.portOf" -}}
{{- $host := regexReplaceAll "^[a-z0-9]+://([^/]*).*$" .url "${1}" }}
{{- $port := regexFind ":[0-9]+$" $host | trimPrefix ":" }}
{{- if $port }}{{ $port }}{{ else if hasPrefix "http://" .url }}80{{ else }}{{ .default }}{{ end }}
{{- end }}
{{- define "temper.egress" -}}
- ports:
    {{- range .ports }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
  {{- with .to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- define "temper.dnsEgress" -}}
- ports:
    {{- range $port := .Values.networkPolicy.dnsPorts | default (ternary (list 53 5353) (list 53) .Values.global.openshift) }}
    - {port: {{ $port }}, protocol: UDP}
    - {port: {{ $port }}, protocol: TCP}
    {{- end }}
  {{- with .Values.networkPolicy.dnsTo }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{/* Where an identity becomes credentials: a token service, or the metadata of the instance. */}}
{{- define "temper.credentialsEgress" -}}
{{ include "temper.egress" (dict "ports" (list 443 80) "to" .Values.networkPolicy.credentialsTo) }}
{{- end }}
{{- define "temper.storeByIdentity" -}}
{{- if and (not .Values.objectStore.bundled) (eq .Values.objectStore.external.credentials "chain") }}true{{ end }}
{{- end }}
{{/* What gateway and engine both need: names, Redis, the object store, the collector. */}}
{{- define "temper.sharedEgress" -}}
{{ include "temper.dnsEgress" . }}
{{- if .Values.redis.bundled }}
- ports:
    - {port: 6379, protocol: TCP}
  to:
    {{- include "temper.peer" (dict "root" . "part" "redis") | nindent 4 }}
{{- else }}
{{- $ports := compact (list .Values.redis.external.port .Values.redis.external.sentinelPort) }}
{{ include "temper.egress" (dict "ports" $ports "to" .Values.networkPolicy.redisTo) }}
{{- end }}
{{- if .Values.objectStore.bundled }}
- ports:
    - {port: 9000, protocol: TCP}
  to:
    {{- include "temper.peer" (dict "root" . "part" "s3") | nindent 4 }}
{{- else }}
{{- $port := include "temper.portOf" (dict "url" .Values.objectStore.external.endpoint "default" (ternary 443 80 .Values.objectStore.external.secure)) }}
{{ include "temper.egress" (dict "ports" (list $port) "to" .Values.networkPolicy.objectStoreTo) }}
{{- end }}
{{- if include "temper.storeByIdentity" . }}
{{ include "temper.credentialsEgress" . }}
{{- end }}
{{- range $url := compact (list .Values.proxy.http .Values.proxy.https) | uniq }}
{{ include "temper.egress" (dict "ports" (list (include "temper.portOf" (dict "url" $url "default" 443))) "to" $.Values.networkPolicy.proxyTo) }}
{{- end }}
{{- with .Values.telemetry.otlpEndpoint }}
{{ include "temper.egress" (dict "ports" (list (include "temper.portOf" (dict "url" . "default" 443))) "to" $.Values.networkPolicy.otlpTo) }}
{{- end }}
{{- end }}
