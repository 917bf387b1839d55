{{/* A gateway as a container, of its own pods and beside an engine: a part (its values are the gateway's) with "port",
     "engines" (TEMPER_ENGINES), "ready" (the path that says so) and "volumes" (what its volumes' names begin with). */}}
{{- define "temper.gatewayContainer" -}}
{{- $gateway := .values }}
- name: gateway
  image: {{ include "temper.image" (dict "root" .root "image" $gateway.image) }}
  imagePullPolicy: {{ $gateway.image.pullPolicy }}
  env:
    {{- $env := merge (include "temper.sharedEnv" .root | fromJson) (dict
          "TEMPER_HOST" "0.0.0.0"
          "TEMPER_PORT" .port
          "TEMPER_ENGINES" .engines
          "TEMPER_UI" $gateway.dashboard
          "TEMPER_DRAIN_DELAY_SECONDS" $gateway.drainDelaySeconds
          "TEMPER_REQUEST_TIMEOUT_SECONDS" $gateway.requestTimeoutSeconds
          "TEMPER_SHUTDOWN_GRACE_SECONDS" (include "temper.gatewayDrain" .root)) }}
    {{- if $gateway.apiKeys.existingSecret }}
    {{- $_ := set $env "TEMPER_API_KEYS_FILE" (printf "/etc/temper/keys/%s" $gateway.apiKeys.key) }}
    {{- end }}
    {{- if .root.Values.tls.enabled }}
    {{- $_ := set $env "TEMPER_GRPC_TLS_SERVER_NAME" (include "temper.tlsServerName" .root) }}
    {{- end }}
    {{- include "temper.env" (merge (dict "env" $env) .) | nindent 4 }}
    {{- include "temper.sharedSecretEnv" .root | nindent 4 }}
  {{- include "temper.envFrom" . | nindent 2 }}
  ports:
    - name: http
      containerPort: {{ .port }}
  startupProbe:
    httpGet: {path: /livez, port: http}
    periodSeconds: 2
    failureThreshold: 30
  livenessProbe:
    httpGet: {path: /livez, port: http}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe:
    # Ready is who has an engine, unless engines come when something is asked of a gateway.
    httpGet: {path: {{ .ready }}, port: http}
    periodSeconds: 2
    timeoutSeconds: 2
    failureThreshold: 2
  resources:
    {{- toYaml $gateway.resources | nindent 4 }}
  securityContext:
    {{- include "temper.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: {{ .volumes }}tmp
      mountPath: /tmp
    {{- if $gateway.apiKeys.existingSecret }}
    - name: {{ .volumes }}keys
      mountPath: /etc/temper/keys
      readOnly: true
    {{- end }}
    {{- include "temper.tlsMount" . | nindent 4 }}
    {{- include "temper.extraMounts" . | nindent 4 }}
{{- end }}

{{/* Volumes of that container. */}}
{{- define "temper.gatewayVolumes" -}}
- name: {{ .volumes }}tmp
  emptyDir:
    sizeLimit: {{ .values.tmpSize }}
{{- with .values.apiKeys.existingSecret }}
- name: {{ $.volumes }}keys
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- include "temper.tlsVolume" . }}
{{- include "temper.extraVolumes" . }}
{{- end }}

{{/* The gateway beside an engine: the part, with the gateway's values as they are there. Its volumes have names of their
     own in that pod. What gateways do besides answering is left to those of the release, which have all engines. */}}
{{- define "temper.httpPart" -}}
{{- $values := deepCopy .Values.gateway }}
{{- range concat $values.extraVolumes $values.extraVolumeMounts }}
{{- $_ := set . "name" (printf "gateway-%s" .name) }}
{{- end }}
{{- $_ := set $values "resources" .Values.engine.http.resources }}
{{- $_ := set $values "dashboard" false }}
{{- $_ := set $values "env" (merge (dict "TEMPER_BATCH_WORKERS" 0 "TEMPER_LEARNERS" false "TEMPER_WEBHOOKS" false) $values.env) }}
{{- toJson (dict "part" "gateway" "values" $values "port" 8000 "engines" "127.0.0.1:50051" "ready" "/readyz" "volumes" "gateway-") }}
{{- end }}

{{/* What endpoint pickers find pods and the names of metrics by: llm-d's router, and the inference extension before it. */}}
{{- define "temper.poolLabels" -}}
{{- $model := regexReplaceAll "[^A-Za-z0-9_.-]+" .Values.engine.servedModelName "-" | trunc 63 | trimAll "-_." }}
{{- toJson (dict
      "app" (printf "%s-engine" (include "temper.fullname" .))
      "llm-d.ai/inference-serving" "true"
      "llm-d.ai/engine-type" "vllm"
      "llm-d.ai/model" $model
      "inference.networking.k8s.io/engine-type" "vllm") }}
{{- end }}
