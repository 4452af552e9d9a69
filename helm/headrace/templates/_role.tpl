{{/* Whether there are encoder workers ("true" or empty). */}}
{{- define "headrace.encodes" -}}
{{- if (default dict .Values.encoder).enabled -}}true{{- end -}}
{{- end -}}

{{/* Name or path of the encoder: packaged, or on the volume. */}}
{{- define "headrace.encoderPath" -}}
{{- with .Values.encoder.path -}}{{- printf "/models/%s" . | trimSuffix "/" -}}{{- else -}}all-minilm-l6-v2{{- end -}}
{{- end -}}

{{/* Settings of gateways and encoder workers for the encoder: (list root path name), where path and name are
     the settings of its path and of its name. */}}
{{- define "headrace.encoderSettings" -}}
{{ index . 1 }}: {{ include "headrace.encoderPath" (first .) }}
{{- with (first .).Values.encoder.servedName }}
{{ index $ 2 }}: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Effective values of a role, as JSON: `defaults`, then `workers`, then those of the role. */}}
{{- define "headrace.role" -}}
{{- $values := .root.Values -}}
{{- $layers := list $values.defaults -}}
{{- if has .name (list "prefill" "decode" "model") -}}
{{- $layers = append $layers $values.workers -}}
{{- end -}}
{{- $layers = append $layers (eq .name "model" | ternary $values.model.job (index $values .name)) -}}
{{- $role := dict -}}
{{- range $layers -}}
{{- $role = include "headrace.merge" (dict "base" $role "over" . "replaced" (include "headrace.unions" "" | fromJsonArray)) | fromJson -}}
{{- end -}}
{{- if include "headrace.needsGpus" (dict "root" .root "role" $role) -}}
{{- $gpus := dict "nvidia.com/gpu" (include "headrace.ranks" (dict "name" .name "role" $role) | int) -}}
{{- $_ := set $role "resources" (mustMergeOverwrite $role.resources (dict "limits" $gpus)) -}}
{{- end -}}
{{- if and (eq .name "model") (not (include "headrace.prepares" .root)) -}}
{{- /* A download uses no device. Workers that wait for it may hold all of them. */}}
{{- $_ := unset $role "resourceClaims" -}}
{{- $resources := pick $role.resources "requests" "limits" -}}
{{- range $kind, $amounts := $resources -}}
{{- range $name := keys $amounts -}}
{{- if include "headrace.isGpu" $name -}}{{- $_ := unset $amounts $name -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $_ := set $role "resources" $resources -}}
{{- end -}}
{{- toJson $role -}}
{{- end -}}

{{/* Number of ranks of a worker; 1 for other roles: (dict "name" role "role" values). */}}
{{- define "headrace.ranks" -}}
{{- has .name (list "prefill" "decode") | ternary (default 1 .role.settings.tp) 1 -}}
{{- end -}}

{{/* Whether the number of ranks decides the number of GPUs ("true" or empty): it is set, the image and the
     device are for GPUs, and the values name no GPUs: (dict "root" root "role" values). */}}
{{- define "headrace.needsGpus" -}}
{{- $image := mustMergeOverwrite (deepCopy .root.Values.image) .role.image -}}
{{- $given := (include "headrace.gpus" .role.resources | fromJson).requested -}}
{{- with .role -}}
{{- if and (hasKey .settings "tp") (eq $image.flavor "cuda") (ne "cpu" (toString .settings.device)) (not (or $given .resources.claims)) -}}
true
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A quantity for each of n ranks together: (list quantity n). */}}
{{- define "headrace.forRanks" -}}
{{- $number := regexFind "^[0-9.]+" (first . | toString) -}}
{{- $total := mulf $number (last .) | printf "%.3f" | trimSuffix ".000" -}}
{{- first . | toString | replace $number $total -}}
{{- end -}}

{{/* Merge two maps, as JSON: (dict "base" map "over" map "replaced" paths). The maps at these paths are
     replaced. */}}
{{- define "headrace.merge" -}}
{{- $base := deepCopy .base -}}
{{- range $path := .replaced -}}
{{- $keys := splitList "." $path -}}
{{- $old := $base -}}
{{- $new := $.over -}}
{{- range initial $keys -}}
{{- $old = index $old . | default dict -}}
{{- $new = index $new . | default dict -}}
{{- end -}}
{{- if hasKey $new (last $keys) -}}{{- $_ := unset $old (last $keys) -}}{{- end -}}
{{- end -}}
{{- mustMergeOverwrite $base (deepCopy .over) | toJson -}}
{{- end -}}

{{/* Paths of a role's values where one key excludes another, such as the sources of a volume; as JSON, each
     with the given prefix. */}}
{{- define "headrace.unions" -}}
{{- $paths := list (printf "%scache" .) -}}
{{- range $context := list "podSecurityContext" "securityContext" -}}
{{- range $profile := list "seccompProfile" "appArmorProfile" -}}
{{- $paths = append $paths (printf "%s%s.%s" $ $context $profile) -}}
{{- end -}}
{{- end -}}
{{- toJson $paths -}}
{{- end -}}

{{/* Values of each set of workers that runs, as JSON, by its name. See `blueGreen`. */}}
{{- define "headrace.sets" -}}
{{- $sets := dict -}}
{{- $plan := default dict .Values.blueGreen -}}
{{- range default (list "blue") $plan.sets -}}
{{- if eq . "blue" -}}
{{- $_ := set $sets . $.Values -}}
{{- else -}}
{{- $green := default dict $plan.green -}}
{{- $replaced := list "model.volume" -}}
{{- range $section := list "workers" "prefill" "decode" -}}
{{- $replaced = concat $replaced (include "headrace.unions" (printf "%s." $section) | fromJsonArray) -}}
{{- end -}}
{{- $values := include "headrace.merge" (dict "base" $.Values "over" $green "replaced" $replaced) | fromJson -}}
{{- if dig "model" "volume" dict $green -}}{{- $_ := set $values.model.claim "enabled" false -}}{{- end -}}
{{- $_ := set $sets . $values -}}
{{- end -}}
{{- end -}}
{{- toJson $sets -}}
{{- end -}}

{{/* Name of the set of workers whose model gateways serve. */}}
{{- define "headrace.activeSet" -}}
{{- $active := default "blue" (default dict .Values.blueGreen).active -}}
{{- if not (hasKey (include "headrace.sets" . | fromJson) $active) -}}
{{- fail (printf "blueGreen.active is %s, which blueGreen.sets does not run" $active) -}}
{{- end -}}
{{- $active -}}
{{- end -}}

{{/* Image of a role: (dict "root" $ "role" values). A tag of the role takes precedence over a digest of all
     roles. */}}
{{- define "headrace.image" -}}
{{- $own := .role.image -}}
{{- $image := mustMergeOverwrite (deepCopy .root.Values.image) $own -}}
{{- $digest := default (index (default dict $image.digests) $image.flavor) $image.digest -}}
{{- if and $own.tag (not $own.digest) -}}{{- $digest = "" -}}{{- end -}}
{{- if $digest -}}
image: {{ $image.repository }}@{{ $digest }}
{{- else -}}
image: {{ $image.repository }}:{{ default (printf "%s-%s" .root.Chart.AppVersion $image.flavor) $image.tag }}
{{- end }}
imagePullPolicy: {{ $image.pullPolicy }}
{{- end -}}

{{/* Number of pods of a role. That of an autoscaled Deployment belongs to its autoscaler, so it stays as it is:
     a number that a release no longer sets would become 1. Empty for a new Deployment, and where the chart is
     only rendered. */}}
{{- define "headrace.replicas" -}}
{{- if eq "none" (dig "autoscaling" "type" "none" .role) -}}
{{- .role.replicas -}}
{{- else -}}
{{- $name := printf "%s-%s" (include "headrace.fullname" .root) (include "headrace.component" .) -}}
{{- $running := lookup "apps/v1" "Deployment" .root.Release.Namespace $name | default dict -}}
{{- with dig "spec" "replicas" 0 $running -}}
{{- max . $.role.autoscaling.minReplicas -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Component and number of the pods of a role, for people: (dict "root" root "name" role). */}}
{{- define "headrace.podCount" -}}
{{- $values := index .root.Values .name -}}
{{- $scaling := dig "autoscaling" (dict "type" "none") $values -}}
{{- $count := printf "%v to %v" $scaling.minReplicas $scaling.maxReplicas -}}
{{- if eq "none" $scaling.type -}}{{- $count = toString $values.replicas -}}{{- end -}}
{{- printf "%s %s" (include "headrace.component" .) $count -}}
{{- end -}}

{{/* Whether a resource is a GPU ("true" or empty): the name of a resource. */}}
{{- define "headrace.isGpu" -}}
{{- if regexMatch "^nvidia\\.com/(gpu|gpu\\.shared|mig-.+)$" . -}}true{{- end -}}
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
{{- if eq .name "encoder" }}
{{ include "headrace.encoderSettings" (list $root "model" "served_model_name") }}
port: 8003
metrics_port: 9090
{{- else }}
model: {{ include "headrace.modelPath" $root }}
{{- with include "headrace.servedName" $root }}
served_model_name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- if eq .name "gateway" }}
{{- if include "headrace.encodes" $root }}
{{ include "headrace.encoderSettings" (list $root "encoder_model" "served_encoder_name") }}
{{- end }}
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

{{/* Environment of a role's container: (dict "root" root "name" role "role" values). */}}
{{- define "headrace.env" -}}
{{- include "headrace.withOwnEnv" (list (include "headrace.madeEnv" .) .role.env) -}}
{{- end -}}

{{/* Environment that the chart makes, and that of the values, which replaces variables of the same name:
     (list YAML variables). */}}
{{- define "headrace.withOwnEnv" -}}
{{- $own := last . | default list -}}
{{- $names := list -}}
{{- range $own -}}{{- $names = append $names .name -}}{{- end -}}
{{- $env := list -}}
{{- range first . | fromYamlArray -}}
{{- if not (has .name $names) -}}{{- $env = append $env . -}}{{- end -}}
{{- end -}}
{{- toYaml (concat $env $own) -}}
{{- end -}}

{{- define "headrace.madeEnv" -}}
{{- $prefix := printf "HEADRACE_%s_" (upper .name) -}}
{{- $values := .root.Values -}}
- name: HEADRACE_CLUSTER_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "headrace.tokenSecret" .root }}
      key: {{ $values.auth.clusterToken.key }}
- name: HEADRACE_SECOND_CLUSTER_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "headrace.tokenSecret" .root }}
      key: {{ $values.auth.clusterToken.secondKey | default "second-token" }}
      optional: true
{{- if $values.tls.enabled }}
{{- range $name, $file := dict "CERT" "tls.crt" "KEY" "tls.key" "CA" "ca.crt" }}
- name: HEADRACE_TLS_{{ $name }}_FILE
  value: /etc/headrace/tls/{{ $file }}
{{- end }}
- name: HEADRACE_TLS_SERVER_NAME
  value: {{ include "headrace.tlsServerName" .root }}
{{- end }}
{{- if has .name (list "prefill" "decode" "encoder") }}
{{- range $setting, $field := dict "WORKER_ID" "metadata.name" "ADVERTISE" "status.podIP" }}
- name: {{ $prefix }}{{ $setting }}
  valueFrom:
    fieldRef:
      fieldPath: {{ $field }}
{{- end }}
{{- with include "headrace.threads" . }}
- name: OMP_NUM_THREADS
  {{- . | nindent 2 }}
{{- end }}
{{- if ne .name "encoder" }}
{{- range $name, $value := $values.transfer.environment }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
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
{{- end -}}

{{/* Threads of each rank of a worker: its part of the CPU limit. Without a limit, one rank has as many as the node
     has cores; of several ranks, each chooses itself (empty). */}}
{{- define "headrace.threads" -}}
{{- $ranks := include "headrace.ranks" . | int -}}
{{- $limit := dig "limits" "cpu" "" .role.resources | toString -}}
{{- if eq $ranks 1 -}}
valueFrom:
  resourceFieldRef:
    resource: limits.cpu
{{- else if $limit -}}
{{- $cores := hasSuffix "m" $limit | ternary (divf (trimSuffix "m" $limit) 1000) (float64 $limit) -}}
value: {{ divf $cores $ranks | floor | int | max 1 | quote }}
{{- end -}}
{{- end -}}

{{/* Folders for files that processes write; the root file system is read-only. */}}
{{- define "headrace.cacheEnv" -}}
{{- range $name, $folder := dict "HOME" "" "HEADRACE_CACHE" "/headrace" "TRITON_CACHE_DIR" "/triton" "NUMBA_CACHE_DIR" "/numba" }}
- name: {{ $name }}
  value: /cache{{ $folder }}
{{- end }}
{{- end -}}
