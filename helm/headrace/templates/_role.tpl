{{/* Effective values of a role, as JSON: `defaults`, then `workers`, then those of the role. */}}
{{- define "headrace.role" -}}
{{- $values := .root.Values -}}
{{- $role := deepCopy $values.defaults -}}
{{- if has .name (list "prefill" "decode" "model") -}}
{{- $role = mustMergeOverwrite $role (deepCopy $values.workers) -}}
{{- end -}}
{{- $own := eq .name "model" | ternary $values.model.job (index $values .name) -}}
{{- $role = mustMergeOverwrite $role (deepCopy $own) -}}
{{- toJson $role -}}
{{- end -}}

{{/* Image of a role: (dict "root" $ "role" values). */}}
{{- define "headrace.image" -}}
{{- $image := mustMergeOverwrite (deepCopy .root.Values.image) .role.image -}}
{{- if $image.digest -}}
image: {{ $image.repository }}@{{ $image.digest }}
{{- else -}}
image: {{ $image.repository }}:{{ default (printf "%s-%s" .root.Chart.AppVersion $image.flavor) $image.tag }}
{{- end }}
imagePullPolicy: {{ $image.pullPolicy }}
{{- end -}}

{{/* Seconds between SIGTERM and SIGKILL: the drain, what precedes it, and 20 s to close. */}}
{{- define "headrace.grace" -}}
{{- add (ceil .role.settings.drain_s) (default 0 .role.preStopSeconds) 20 -}}
{{- end -}}

{{/* Settings that the chart makes for a role, as YAML. They are not values of the chart. */}}
{{- define "headrace.ownSettings" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
host: {{ $values.host | quote }}
health_port: 9091
{{- if eq .name "router" }}
port: 8002
{{- else }}
routers: {{ include "headrace.routers" $root }}
model: {{ include "headrace.modelPath" $root }}
{{- with include "headrace.servedName" $root }}
served_model_name: {{ . | quote }}
{{- end }}
{{- end }}
{{- if eq .name "gateway" }}
port: 8000
grpc_port: 8001
{{- if not $values.inferencePool.enabled }}
metrics_port: 9090
{{- end }}
{{- if include "headrace.keysSecret" $root }}
api_keys_file: /etc/headrace/keys/{{ $values.auth.apiKeys.key }}
{{- end }}
{{- end }}
{{- if has .name (list "prefill" "decode") }}
port: 8003
metrics_port: 9090
transfer_interface: {{ $values.transfer.interface }}
transfer_ports: {{ $values.transfer.ports }}
{{- with include "headrace.codebooks" $root }}
codebooks: {{ . }}
{{- end }}
{{- with include "headrace.kvFormat" $root }}
kv_format: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Environment of a role's container: (dict "root" $ "name" role "role" values). */}}
{{- define "headrace.env" -}}
{{- $prefix := printf "HEADRACE_%s_" (upper .name) -}}
{{- $values := .root.Values -}}
- name: HEADRACE_CLUSTER_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "headrace.tokenSecret" .root }}
      key: {{ $values.auth.clusterToken.key }}
{{- if $values.tls.enabled }}
{{- range $name, $file := dict "CERT" "tls.crt" "KEY" "tls.key" "CA" "ca.crt" }}
- name: HEADRACE_TLS_{{ $name }}_FILE
  value: /etc/headrace/tls/{{ $file }}
{{- end }}
- name: HEADRACE_TLS_SERVER_NAME
  value: {{ include "headrace.tlsServerName" .root }}
{{- end }}
{{- if has .name (list "prefill" "decode") }}
{{- range $setting, $field := dict "WORKER_ID" "metadata.name" "ADVERTISE" "status.podIP" }}
- name: {{ $prefix }}{{ $setting }}
  valueFrom:
    fieldRef:
      fieldPath: {{ $field }}
{{- end }}
- name: OMP_NUM_THREADS
  valueFrom:
    resourceFieldRef:
      resource: limits.cpu
{{- range $name, $value := $values.transfer.environment }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
{{- $own := include "headrace.ownSettings" . | fromYaml }}
{{- range $setting := list "codebooks" "kv_format" }}
{{- if and (hasKey $own $setting) (hasKey $.role.settings $setting) }}
{{- fail (printf "model.prepare sets %s of workers: leave it out of their settings" $setting) }}
{{- end }}
{{- end }}
{{- range $name, $value := mustMergeOverwrite (deepCopy .role.settings) $own }}
- name: {{ $prefix }}{{ upper $name }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- with $values.tracing }}
{{- if .endpoint }}
{{- range $name, $value := dict "EXPORTER_OTLP_ENDPOINT" .endpoint "EXPORTER_OTLP_PROTOCOL" .protocol "TRACES_SAMPLER" "parentbased_traceidratio" "TRACES_SAMPLER_ARG" (toString .ratio) }}
- name: OTEL_{{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
{{- end }}
{{ include "headrace.cacheEnv" . | trim }}
{{- with .role.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Folders for files that processes write; the root file system is read-only. */}}
{{- define "headrace.cacheEnv" -}}
{{- range $name, $folder := dict "HOME" "" "HEADRACE_CACHE" "/headrace" "TRITON_CACHE_DIR" "/triton" "NUMBA_CACHE_DIR" "/numba" }}
- name: {{ $name }}
  value: /cache{{ $folder }}
{{- end }}
{{- end -}}
