{{/* Volume source of the checkpoints, as YAML; empty without a volume. */}}
{{- define "headrace.modelVolume" -}}
{{- $model := .Values.model -}}
{{- if $model.claim.enabled -}}
persistentVolumeClaim:
  claimName: {{ include "headrace.fullname" . }}-models
{{- else if $model.volume -}}
{{ toYaml $model.volume }}
{{- else if $model.fetch.repository -}}
emptyDir: {}
{{- end -}}
{{- end -}}

{{/* Whether the model is factorized or something is calibrated ("true" or empty). */}}
{{- define "headrace.prepares" -}}
{{- with .Values.model.prepare -}}
{{- if or .keep .codebooks .kvFormat -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether a Job prepares the model on a persistent volume claim ("true" or empty). */}}
{{- define "headrace.modelJob" -}}
{{- $model := .Values.model -}}
{{- $prepares := include "headrace.prepares" . -}}
{{- $claim := or $model.claim.enabled (hasKey $model.volume "persistentVolumeClaim") -}}
{{- if and $prepares (not $claim) -}}
{{- fail "model.prepare needs model.claim.enabled or model.volume.persistentVolumeClaim" -}}
{{- end -}}
{{- $shared := and $model.volume (not (or $claim (hasKey $model.volume "emptyDir") (hasKey $model.volume "ephemeral"))) -}}
{{- if and $model.fetch.repository $shared -}}
{{- fail "model.fetch downloads to model.claim, model.volume.persistentVolumeClaim or a volume of each pod: pods would write to the same folder of this model.volume" -}}
{{- end -}}
{{- if and $claim (or $model.fetch.repository $prepares) -}}true{{- end -}}
{{- end -}}

{{/* Folder of what is downloaded or made. It changes with what is asked for, so that an upgrade makes
     its files beside the old ones, and a rollback finds them. */}}
{{- define "headrace.modelFolder" -}}
{{- $model := .Values.model -}}
{{- $fetch := pick $model.fetch "repository" "revision" "include" -}}
/models/headrace-{{ list $model.path $fetch $model.prepare | toJson | sha256sum | trunc 12 }}
{{- end -}}

{{/* Name or path of the model before preparation: downloaded, packaged, or on the volume. */}}
{{- define "headrace.modelSource" -}}
{{- $model := .Values.model -}}
{{- if $model.fetch.repository -}}
{{- printf "%s/source/%s" (include "headrace.modelFolder" .) $model.path | trimSuffix "/" -}}
{{- else if or (eq $model.path "smollm2-135m") (not (include "headrace.modelVolume" .)) -}}
{{- default "smollm2-135m" $model.path -}}
{{- else -}}
{{- printf "/models/%s" $model.path | trimSuffix "/" -}}
{{- end -}}
{{- end -}}

{{/* Name or path of the model that is served. */}}
{{- define "headrace.modelPath" -}}
{{- if .Values.model.prepare.keep -}}
{{- include "headrace.modelFolder" . }}/factorized
{{- else -}}
{{- include "headrace.modelSource" . -}}
{{- end -}}
{{- end -}}

{{/* Name for clients. Empty: derived by the services, from a path that has the name. */}}
{{- define "headrace.servedName" -}}
{{- $model := .Values.model -}}
{{- if $model.servedName -}}
{{- $model.servedName -}}
{{- else if or $model.fetch.repository $model.prepare.keep -}}
{{- base (default $model.path $model.fetch.repository) -}}
{{- with $model.prepare.keep -}}-keep{{ . }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "headrace.codebooks" -}}
{{- if .Values.model.prepare.codebooks -}}{{ include "headrace.modelFolder" . }}/codebooks.json{{- end -}}
{{- end -}}

{{- define "headrace.kvFormat" -}}
{{- with .Values.model.prepare.kvFormat -}}
{{ . }}:{{ include "headrace.modelFolder" $ }}/{{ . }}.safetensors
{{- end -}}
{{- end -}}

{{/* Environment of a container that downloads: (dict "root" root "role" values). */}}
{{- define "headrace.fetchEnv" -}}
{{- include "headrace.withOwnEnv" (list (include "headrace.madeFetchEnv" .) .role.env) -}}
{{- end -}}

{{- define "headrace.madeFetchEnv" -}}
{{- with .root.Values.model.fetch.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- with .root.Values.model.fetch.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{ include "headrace.cacheEnv" . | trim }}
{{- end -}}

{{/* Shell command that downloads, unless it was done before: (dict "root" $ "include" patterns). The
     folder gets its name when it is complete. */}}
{{- define "headrace.fetchCommand" -}}
{{- $folder := include "headrace.modelFolder" .root -}}
{{- with .root.Values.model.fetch -}}
[ -e {{ $folder }}/source ] || {
  hf download {{ squote .repository }} --revision {{ squote .revision }} --local-dir {{ $folder }}/source.partial
  {{- range $.include }} \
    --include {{ squote . }}
  {{- end }}
  mv {{ $folder }}/source.partial {{ $folder }}/source
}
{{- end -}}
{{- end -}}

{{/* Init container of a pod that needs the model: downloads it, or waits until the Job has made it. */}}
{{- define "headrace.modelInit" -}}
{{- $root := .root -}}
{{- $job := include "headrace.modelJob" $root -}}
{{- if or $job $root.Values.model.fetch.repository -}}
- name: model
  {{- include "headrace.image" . | nindent 2 }}
  command: [sh, -ec]
  args:
    - |
      {{- if $job }}
      until [ -e {{ include "headrace.modelFolder" $root }}/complete ]; do sleep 2; done
      {{- else }}
      {{- $include := $root.Values.model.fetch.include }}
      {{- if eq .name "gateway" }}{{ $include = without $include "*.safetensors" }}{{ end }}
      {{- include "headrace.fetchCommand" (dict "root" $root "include" $include) | nindent 6 }}
      {{- end }}
  {{- if not $job }}
  env:
    {{- include "headrace.fetchEnv" . | trim | nindent 4 }}
  {{- with .role.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with include "headrace.resources" . | fromYaml }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml .role.securityContext | nindent 4 }}
  volumeMounts:
    - name: models
      mountPath: /models
      readOnly: {{ ne $job "" }}
    - name: cache
      mountPath: /cache
    - name: tmp
      mountPath: /tmp
    {{- with .role.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
{{- end -}}
