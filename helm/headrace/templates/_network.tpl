{{/* The connections of a deployment, by role of the caller: roles that it calls and their port names. */}}
{{- define "headrace.connections" -}}
gateway: {router: [http], prefill: [grpc], decode: [grpc]}
router: {}
prefill: {router: [http], decode: [transfer]}
decode: {router: [http], prefill: [grpc, transfer]}
model: {}
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
    - podSelector:
        matchLabels:
          {{- include "headrace.roleLabels" (dict "root" $root "name" $caller) | nindent 10 }}
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
    - podSelector:
        matchLabels:
          {{- include "headrace.roleLabels" (dict "root" $root "name" "test") | nindent 10 }}
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
    - podSelector:
        matchLabels:
          {{- include "headrace.roleLabels" (dict "root" $root "name" $called) | nindent 10 }}
  ports:
    {{- include "headrace.policyPorts" (dict "root" $root "name" $called "ports" $ports) | nindent 4 }}
{{- end }}
{{- $downloads := eq .name "model" | ternary true (and (ne .name "router") (not (include "headrace.modelJob" .root))) }}
{{- if and $downloads $values.model.fetch.repository }}
{{- $url := urlParse (default "https://hub" $values.model.fetch.endpoint) }}
- ports:
    - {protocol: TCP, port: {{ include "headrace.urlPort" $url }}}
{{- end }}
{{- if and $values.tracing.endpoint (ne .name "model") }}
- ports:
    - {protocol: TCP, port: {{ urlParse $values.tracing.endpoint | include "headrace.urlPort" }}}
{{- end }}
{{- end -}}

{{/* Port of a URL, from urlParse. */}}
{{- define "headrace.urlPort" -}}
{{- regexFind ":[0-9]+$" .host | trimPrefix ":" | default (eq .scheme "https" | ternary "443" "80") -}}
{{- end -}}
