{{/* Pod template of a role: (dict "root" root "name" role "role" values). */}}
{{- define "headrace.pod" -}}
{{- $pod := include "headrace.uncheckedPod" . -}}
{{- include "headrace.checkPod" (dict "name" (include "headrace.section" .) "spec" (fromYaml $pod).spec) -}}
{{- $pod -}}
{{- end -}}

{{- define "headrace.uncheckedPod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $role := .role -}}
{{- $worker := has .name (list "prefill" "decode") -}}
{{- $rdma := and $worker $values.rdma.enabled -}}
{{- $model := and (ne .name "router") (include "headrace.modelVolume" $root) -}}
metadata:
  labels:
    {{- include "headrace.podLabels" . | nindent 4 }}
    {{- with $role.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $annotations := include "headrace.podAnnotations" . | fromYaml }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "headrace.podBase" . | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "headrace.grace" . }}
  {{- $init := not (has .name (list "router" "encoder")) | ternary (include "headrace.modelInit" .) "" }}
  {{- if or $init $role.extraInitContainers }}
  initContainers:
    {{- with $role.extraInitContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with $init }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .name }}
      {{- include "headrace.image" . | nindent 6 }}
      command: [headrace]
      args: [{{ .name }}]
      env:
        {{- include "headrace.env" . | nindent 8 }}
      {{- with $role.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- range $port, $number := include "headrace.ports" . | fromYaml }}
        - name: {{ $port }}
          containerPort: {{ $number }}
        {{- end }}
      {{- include "headrace.probes" . | nindent 6 }}
      {{- with $role.preStopSeconds }}
      lifecycle:
        preStop:
          sleep:
            seconds: {{ . }}
      {{- end }}
      {{- with include "headrace.resources" . | fromYaml }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "headrace.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - name: cache
          mountPath: /cache
        - name: tmp
          mountPath: /tmp
        {{- if $model }}
        - name: models
          mountPath: /models
          readOnly: true
        {{- end }}
        {{- if $values.tls.enabled }}
        - name: tls
          mountPath: /etc/headrace/tls
          readOnly: true
        {{- end }}
        {{- if and (eq .name "gateway") (include "headrace.keysSecret" $root) }}
        - name: keys
          mountPath: /etc/headrace/keys
          readOnly: true
        {{- end }}
        {{- if $role.sharedMemory }}
        - name: shm
          mountPath: /dev/shm
        {{- end }}
        {{- if and $rdma $values.rdma.hugepages.amount }}
        - name: hugepages
          mountPath: /dev/hugepages
        {{- end }}
        {{- with $role.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $role.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: cache
      {{- include "headrace.cacheVolume" $role | nindent 6 }}
    - name: tmp
      emptyDir: {}
    {{- if $model }}
    - name: models
      {{- include "headrace.modelVolume" $root | nindent 6 }}
    {{- end }}
    {{- if $values.tls.enabled }}
    - name: tls
      secret:
        secretName: {{ include "headrace.tlsSecret" $root }}
        defaultMode: 0440
    {{- end }}
    {{- if and (eq .name "gateway") (include "headrace.keysSecret" $root) }}
    - name: keys
      secret:
        secretName: {{ include "headrace.keysSecret" $root }}
        defaultMode: 0440
    {{- end }}
    {{- if $role.sharedMemory }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ include "headrace.forRanks" (list $role.sharedMemory (include "headrace.ranks" . | int)) }}
    {{- end }}
    {{- if and $rdma $values.rdma.hugepages.amount }}
    - name: hugepages
      emptyDir:
        medium: HugePages-{{ $values.rdma.hugepages.size }}
    {{- end }}
    {{- with $role.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Source of the volume for caches: values of a role. */}}
{{- define "headrace.cacheVolume" -}}
{{- toYaml (default (dict "emptyDir" dict) .cache) -}}
{{- end -}}

{{/* Container ports by name. */}}
{{- define "headrace.ports" -}}
{{- $settings := include "headrace.ownSettings" . | fromYaml -}}
{{- $names := dict "port" (ternary "grpc" "http" (has .name (list "prefill" "decode" "encoder"))) "grpc_port" "grpc" "metrics_port" "metrics" "health_port" "health" -}}
{{- range $setting, $name := $names -}}
{{- with index $settings $setting }}
{{ $name }}: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The health port serves plain HTTP without a token, also under mutual TLS. */}}
{{- define "headrace.probes" -}}
startupProbe:
  httpGet: {path: /health, port: health}
  periodSeconds: 5
  failureThreshold: {{ div (add .role.startupSeconds 4) 5 }}
livenessProbe:
  httpGet: {path: /health, port: health}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /ready, port: health}
  periodSeconds: 2
  timeoutSeconds: 6
  failureThreshold: 2
{{- end -}}

{{/* Pods restart when tokens of a Secret that the chart makes have changed. Gateways read new API keys
     without a restart. */}}
{{- define "headrace.podAnnotations" -}}
{{- $values := .root.Values -}}
{{- with $values.auth.clusterToken.value }}
checksum/token: {{ sha256sum . }}
{{- end }}
{{- with $values.auth.clusterToken.secondValue }}
checksum/second-token: {{ sha256sum . }}
{{- end }}
{{- if and (has .name (list "prefill" "decode")) $values.rdma.enabled $values.rdma.networks }}
k8s.v1.cni.cncf.io/networks: {{ $values.rdma.networks | quote }}
{{- end }}
{{- with .role.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Capabilities act for root only: Kubernetes has no ambient ones. */}}
{{- define "headrace.podSecurity" -}}
{{- $context := deepCopy .role.podSecurityContext -}}
{{- if include "headrace.ipcLock" . -}}
{{- $context = mustMergeOverwrite $context (dict "runAsNonRoot" false "runAsUser" 0 "runAsGroup" 0) -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{- define "headrace.containerSecurity" -}}
{{- $context := deepCopy .role.securityContext -}}
{{- if include "headrace.ipcLock" . -}}
{{- $context = mustMergeOverwrite $context (dict "capabilities" (dict "add" (list "IPC_LOCK"))) -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{- define "headrace.ipcLock" -}}
{{- with .root.Values.rdma -}}
{{- if and .enabled .ipcLock (has $.name (list "prefill" "decode")) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Resources of a container; those of RDMA are requested and limited alike. */}}
{{- define "headrace.resources" -}}
{{- $resources := deepCopy .role.resources -}}
{{- $rdma := .root.Values.rdma -}}
{{- if and $rdma.enabled (has .name (list "prefill" "decode")) -}}
{{- $devices := dict $rdma.resource $rdma.count -}}
{{- with $rdma.hugepages.amount -}}
{{- $_ := set $devices (printf "hugepages-%s" $rdma.hugepages.size) . -}}
{{- end -}}
{{- $resources = mustMergeOverwrite $resources (dict "requests" $devices "limits" (deepCopy $devices)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* What all pods have in common: (dict "root" $ "name" component "role" values). */}}
{{- define "headrace.podBase" -}}
serviceAccountName: {{ include "headrace.serviceAccount" .root }}
automountServiceAccountToken: false
# Variables of a Service, such as HEADRACE_ROUTER_PORT, would be read as settings.
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "headrace.podSecurity" . | nindent 2 }}
{{ include "headrace.scheduling" . | trim }}
{{- end -}}
