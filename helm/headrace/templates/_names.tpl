{{- define "headrace.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Name of all objects, at most 40 characters: suffixes follow, and labels have at most 63. */}}
{{- define "headrace.fullname" -}}
{{- $name := include "headrace.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "headrace.selectorLabels" -}}
app.kubernetes.io/name: {{ include "headrace.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of the pods of a role. Unlike those of other objects they do not change with the chart's
     version, so that its upgrade alone does not restart workers. */}}
{{- define "headrace.podLabels" -}}
{{ include "headrace.roleLabels" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "headrace.labels" -}}
{{ include "headrace.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Metadata of an object: (dict "root" $ "name" suffix "component" label). The component is by default
     the suffix. */}}
{{- define "headrace.metadata" -}}
name: {{ include "headrace.fullname" .root }}{{ with .name }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "headrace.labels" .root | nindent 2 }}
  {{- with default .name .component }}
  app.kubernetes.io/component: {{ . }}
  {{- end }}
{{- end -}}

{{/* Labels that select the pods of a role: (dict "root" $ "name" role). */}}
{{- define "headrace.roleLabels" -}}
{{ include "headrace.selectorLabels" .root }}
app.kubernetes.io/component: {{ .name }}
{{- end -}}

{{- define "headrace.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "headrace.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "headrace.tokenSecret" -}}
{{- default (printf "%s-token" (include "headrace.fullname" .)) .Values.auth.clusterToken.existingSecret -}}
{{- end -}}

{{- define "headrace.keysSecret" -}}
{{- with .Values.auth.apiKeys -}}
{{- if .existingSecret -}}{{ .existingSecret }}
{{- else if .hashes -}}{{ include "headrace.fullname" $ }}-api-keys
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "headrace.tlsSecret" -}}
{{- default (printf "%s-tls" (include "headrace.fullname" .)) .Values.tls.existingSecret -}}
{{- end -}}

{{- define "headrace.tlsServerName" -}}
{{- default (printf "%s.%s.svc" (include "headrace.fullname" .) .Release.Namespace) .Values.tls.serverName -}}
{{- end -}}

{{/* URLs of all routers, as a JSON list: workers register with each of them. */}}
{{- define "headrace.routers" -}}
{{- $service := printf "%s-router" (include "headrace.fullname" .) -}}
{{- $urls := list -}}
{{- range $number := until (int .Values.router.replicas) -}}
{{- $host := printf "%s-%d.%s.%s.svc" $service $number $service $.Release.Namespace -}}
{{- $urls = append $urls (printf "%s://%s:8002" (ternary "https" "http" $.Values.tls.enabled) $host) -}}
{{- end -}}
{{- toJson $urls -}}
{{- end -}}
