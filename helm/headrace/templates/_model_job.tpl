{{/* Pod template of the Job that prepares the model: (dict "root" $ "name" "model" "role" values). What was
     made before is not made again. */}}
{{- define "headrace.modelPod" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $values := .root.Values -}}
{{- $prepare := $values.model.prepare -}}
{{- $folder := include "headrace.modelFolder" $root -}}
{{- $path := include "headrace.modelPath" $root -}}
metadata:
  labels:
    {{- include "headrace.podLabels" . | nindent 4 }}
    {{- with $role.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $role.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: OnFailure
  {{- include "headrace.podBase" . | nindent 2 }}
  containers:
    - name: model
      {{- include "headrace.image" . | nindent 6 }}
      command: [sh, -ec]
      args:
        - |
          {{- if $values.model.fetch.repository }}
          {{- include "headrace.fetchCommand" (dict "root" $root "include" $values.model.fetch.include) | nindent 10 }}
          {{- end }}
          {{- if $prepare.keep }}
          [ -e {{ $path }} ] || headrace compress --model {{ include "headrace.modelSource" $root }} --keep {{ $prepare.keep }} --out {{ $path }}
          {{- end }}
          {{- with include "headrace.kvFormat" $root }}
          [ -e {{ splitList ":" . | last }} ] || headrace calibrate --model {{ $path }} --kv-format {{ $prepare.kvFormat }} --out {{ splitList ":" . | last }}
          {{- range $prepare.kvFormatFlags }} {{ squote . }}{{ end }}
          {{- end }}
          {{- with include "headrace.codebooks" $root }}
          [ -e {{ . }} ] || headrace calibrate --model {{ $path }} --out {{ . }}
          {{- with include "headrace.kvFormat" $root }} --kv-format {{ . }}{{ end }}
          {{- end }}
          touch {{ $folder }}/complete
      env:
        {{- include "headrace.fetchEnv" . | trim | nindent 8 }}
      {{- with $role.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with include "headrace.resources" . | fromYaml }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- toYaml $role.securityContext | nindent 8 }}
      volumeMounts:
        - name: models
          mountPath: /models
        - name: cache
          mountPath: /cache
        - name: tmp
          mountPath: /tmp
        {{- with $role.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: models
      {{- include "headrace.modelVolume" $root | nindent 6 }}
    - name: cache
      {{- include "headrace.cacheVolume" $role | nindent 6 }}
    - name: tmp
      emptyDir: {}
    {{- with $role.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
