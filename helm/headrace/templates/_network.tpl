{{/* The connections of a deployment, by role of the caller: roles that it calls and their port names. */}}
{{- define "headrace.connections" -}}
{{- if include "headrace.encodes" . -}}
gateway: {router: [http], prefill: [grpc], decode: [grpc], encoder: [grpc]}
encoder: {router: [http]}
{{- else -}}
gateway: {router: [http], prefill: [grpc], decode: [grpc]}
{{- end }}
router: {}
prefill: {router: [http], decode: [grpc, transfer]}
decode: {router: [http], prefill: [grpc, transfer]}
model: {}
test: {gateway: [http]}
{{- end -}}

{{/* Peers that are the pods of a role, in all sets of workers: (dict "root" root "name" role). */}}
{{- define "headrace.rolePods" -}}
{{- $components := list .name -}}
{{- if has .name (list "prefill" "decode") -}}
{{- $components = list -}}
{{- range $set, $_ := include "headrace.sets" .root | fromJson -}}
{{- $components = append $components (include "headrace.component" (dict "root" (dict "set" $set) "name" $.name)) -}}
{{- end -}}
{{- end -}}
{{- range $components }}
- podSelector:
    matchLabels:
      {{- include "headrace.selectorLabels" $.root | nindent 6 }}
      app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{/* Ports of a NetworkPolicy: (dict "root" $ "name" role "ports" names). */}}
{{- define "headrace.policyPorts" -}}
{{- $numbers := include "headrace.ports" . | fromYaml -}}
{{- $range := splitList "-" .root.Values.transfer.ports -}}
{{- range .ports }}
{{- if eq . "transfer" }}
- {protocol: TCP, port: {{ first $range }}, endPort: {{ last $range }}}
{{- else }}
- {protocol: TCP, port: {{ index $numbers . }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Ingress rules of a role: from its callers, and from clients and monitoring. */}}
{{- define "headrace.ingressRules" -}}
{{- $root := .root -}}
{{- $name := .name -}}
{{- $values := .root.Values -}}
{{- range $caller, $called := include "headrace.connections" $root | fromYaml }}
{{- with index $called $name }}
- from:
    {{- include "headrace.rolePods" (dict "root" $root "name" $caller) | nindent 4 }}
  ports:
    {{- include "headrace.policyPorts" (dict "root" $root "name" $name "ports" .) | nindent 4 }}
{{- end }}
{{- end }}
{{- if eq $name "gateway" }}
- ports:
    {{- include "headrace.policyPorts" (dict "root" $root "name" $name "ports" (list "http" "grpc")) | nindent 4 }}
  {{- with $values.networkPolicy.clients }}
  from:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- /* With an InferencePool, metrics are on the gateway's HTTP port, which only `clients` and `monitoring` open. */}}
{{- $shared := and (eq $name "gateway") $values.inferencePool.enabled }}
{{- $metrics := or (eq $name "router") $shared | ternary "http" "metrics" }}
{{- $known := index (include "headrace.ports" . | fromYaml) $metrics }}
{{- if and $known (or $values.networkPolicy.monitoring (not $shared)) }}
- ports:
    {{- include "headrace.policyPorts" (dict "root" $root "name" $name "ports" (list $metrics)) | nindent 4 }}
  {{- with $values.networkPolicy.monitoring }}
  from:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Egress rules of a role, apart from DNS. */}}
{{- define "headrace.egressRules" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- range $called, $ports := index (include "headrace.connections" .root | fromYaml) .name }}
- to:
    {{- include "headrace.rolePods" (dict "root" $root "name" $called) | nindent 4 }}
  ports:
    {{- include "headrace.policyPorts" (dict "root" $root "name" $called "ports" $ports) | nindent 4 }}
{{- end }}
{{- $reads := has .name (list "gateway" "prefill" "decode") }}
{{- $downloads := or (eq .name "model") (and $reads (not (include "headrace.modelJob" .root))) }}
{{- if and $downloads $values.model.fetch.repository }}
{{- $url := urlParse (default "https://hub" $values.model.fetch.endpoint) }}
- ports:
    - {protocol: TCP, port: {{ include "headrace.urlPort" $url }}}
{{- end }}
{{- if and $values.tracing.endpoint (or $reads (has .name (list "router" "encoder"))) }}
- ports:
    - {protocol: TCP, port: {{ urlParse $values.tracing.endpoint | include "headrace.urlPort" }}}
{{- end }}
{{- end -}}

{{/* Port of a URL, from urlParse. */}}
{{- define "headrace.urlPort" -}}
{{- regexFind ":[0-9]+$" .host | trimPrefix ":" | default (eq .scheme "https" | ternary "443" "80") -}}
{{- end -}}
