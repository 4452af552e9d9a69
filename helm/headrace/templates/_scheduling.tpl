{{/* Scheduling of a role's pods: (dict "root" $ "name" role "role" values). */}}
{{- define "headrace.scheduling" -}}
{{- $labels := include "headrace.roleLabels" . | fromYaml -}}
{{- with pick .role "nodeSelector" "tolerations" "priorityClassName" "runtimeClassName" "schedulerName" "resourceClaims" }}
{{- range $key, $value := . }}
{{- if $value }}
{{ toYaml (dict $key $value) }}
{{- end }}
{{- end }}
{{- end }}
{{- $affinity := mustMergeOverwrite (include "headrace.proximity" . | fromYaml) (deepCopy .role.affinity) }}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $selector := dict "labelSelector" (dict "matchLabels" $labels) }}
{{- $spread := list }}
{{- range .role.topologySpreadConstraints }}
{{- $spread = append $spread (hasKey . "labelSelector" | ternary . (merge (deepCopy .) $selector)) }}
{{- end }}
{{- with $spread }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Affinity of prefill and decode workers to each other. Only decode workers can require it: with a
     requirement in both directions neither could start first. */}}
{{- define "headrace.proximity" -}}
{{- $proximity := .root.Values.proximity -}}
{{- if and $proximity.topologyKey (has .name (list "prefill" "decode")) -}}
{{- $other := ternary "decode" "prefill" (eq .name "prefill") -}}
{{- $labels := include "headrace.roleLabels" (dict "root" .root "name" $other) | fromYaml -}}
{{- $term := dict "topologyKey" $proximity.topologyKey "labelSelector" (dict "matchLabels" $labels) -}}
podAffinity:
  {{- if and $proximity.required (eq .name "decode") }}
  requiredDuringSchedulingIgnoredDuringExecution:
    - {{- toYaml $term | nindent 6 }}
  {{- else }}
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        {{- toYaml $term | nindent 8 }}
  {{- end }}
{{- end -}}
{{- end -}}
