{{- define "headrace.name" -}}
{{- include "headrace.cut" (list 63 (default .Chart.Name .Values.nameOverride)) -}}
{{- end -}}

{{/* Name of all objects, at most 40 characters: suffixes follow, and labels have at most 63. */}}
{{- define "headrace.fullname" -}}
{{- $name := include "headrace.name" . -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- include "headrace.cut" (list 40 (default $full .Values.fullnameOverride)) -}}
{{- end -}}

{{/* A name of limited length: (list length name). What is cut is replaced by a hash of the whole name, so
     that two long names stay distinct. */}}
{{- define "headrace.cut" -}}
{{- $length := first . -}}
{{- $name := last . -}}
{{- if le (len $name) $length -}}
{{- $name -}}
{{- else -}}
{{- printf "%s-%s" (trunc (int (sub $length 9)) $name | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- end -}}

{{/* Content of a file of the chart: (list root path). */}}
{{- define "headrace.file" -}}
{{- $content := (first .).Files.Get (last .) -}}
{{- if not $content -}}
{{- fail (printf "this package of the chart lacks %s" (last .)) -}}
{{- end -}}
{{- $content -}}
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

{{/* Component of an object: its role, with the set of workers unless that is `blue`:
     (dict "root" root "name" role). */}}
{{- define "headrace.component" -}}
{{- .name -}}
{{- if and (eq "green" (default "" .root.set)) (has .name (list "prefill" "decode" "model")) -}}-green{{- end -}}
{{- end -}}

{{/* Metadata of an object: (dict "root" root "name" role "suffix" end of the name). */}}
{{- define "headrace.metadata" -}}
name: {{ include "headrace.fullname" .root }}{{ with .name }}-{{ include "headrace.component" $ }}{{ end }}{{ with .suffix }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "headrace.labels" .root | nindent 2 }}
  {{- if .name }}
  app.kubernetes.io/component: {{ include "headrace.component" . }}
  {{- end }}
{{- end -}}

{{/* Labels that select the pods of a role: (dict "root" root "name" role). */}}
{{- define "headrace.roleLabels" -}}
{{ include "headrace.selectorLabels" .root }}
app.kubernetes.io/component: {{ include "headrace.component" . }}
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
