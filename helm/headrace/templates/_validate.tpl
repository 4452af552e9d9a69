{{/* Refuse values that the schema accepts, but that cannot work. */}}
{{- define "headrace.validate" -}}
{{- $faults := list -}}
{{- $sets := include "headrace.sets" . | fromJson -}}
{{- range $name := list "gateway" "router" -}}
{{- $role := include "headrace.role" (dict "root" $ "name" $name) | fromJson -}}
{{- $faults = concat $faults (include "headrace.roleFaults" (dict "root" $ "name" $name "role" $role) | fromJsonArray) -}}
{{- end -}}
{{- if include "headrace.encodes" . -}}
{{- $role := include "headrace.role" (dict "root" $ "name" "encoder") | fromJson -}}
{{- $context := dict "root" $ "name" "encoder" "role" $role -}}
{{- $faults = concat $faults (include "headrace.roleFaults" $context | fromJsonArray) (include "headrace.deviceFaults" $context | fromJsonArray) -}}
{{- if not (or (empty .Values.encoder.path) .Values.model.claim.enabled .Values.model.volume) -}}
{{- $faults = append $faults "encoder.path: no volume contains the encoder; set model.volume or model.claim, or leave encoder.path empty for the packaged encoder" -}}
{{- end -}}
{{- end -}}
{{- range $set, $values := $sets -}}
{{- $root := set (set (omit $ "Values") "Values" $values) "set" $set -}}
{{- $faults = concat $faults (include "headrace.workerFaults" $root | fromJsonArray) -}}
{{- end -}}
{{- range list "portFaults" "nameFaults" "releaseFaults" -}}
{{- $faults = concat $faults (include (printf "headrace.%s" .) $ | fromJsonArray) -}}
{{- end -}}
{{- with $faults -}}
{{- fail (printf "these values cannot work:\n- %s" (uniq . | join "\n- ")) -}}
{{- end -}}
{{- end -}}

{{/* Path of a role's values, for messages: (dict "root" root "name" role). */}}
{{- define "headrace.section" -}}
{{- if eq "green" (default "" .root.set) -}}blueGreen.green.{{- end -}}
{{- eq .name "model" | ternary "model.job" .name -}}
{{- end -}}

{{/* Faults of any role, as a JSON list: (dict "root" root "name" role "role" values). */}}
{{- define "headrace.roleFaults" -}}
{{- $faults := list -}}
{{- $name := include "headrace.section" . -}}
{{- with .role.autoscaling -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- $faults = append $faults (printf "%s.autoscaling.minReplicas (%v) is greater than maxReplicas (%v)" $name .minReplicas .maxReplicas) -}}
{{- end -}}
{{- if and (eq .type "cpu") (not (or (dig "requests" "cpu" "" $.role.resources) (dig "limits" "cpu" "" $.role.resources))) -}}
{{- $faults = append $faults (printf "%s.autoscaling.type cpu needs %s.resources.requests.cpu" $name $name) -}}
{{- end -}}
{{- end -}}
{{- with dig "strategy" "rollingUpdate" dict .role -}}
{{- if and (eq "0" (toString .maxSurge | trimSuffix "%")) (eq "0" (toString .maxUnavailable | trimSuffix "%")) -}}
{{- $faults = append $faults (printf "%s.strategy.rollingUpdate: maxSurge and maxUnavailable must not both be 0" $name) -}}
{{- end -}}
{{- end -}}
{{- $gpus := include "headrace.gpus" .role.resources | fromJson -}}
{{- if and $gpus.count (has .name (list "gateway" "router")) -}}
{{- $faults = append $faults (printf "%s.resources: a %s uses no GPU; set GPUs in workers.resources, since defaults.resources apply to all roles" $name .name) -}}
{{- end -}}
{{- if ne $gpus.count $gpus.requested -}}
{{- $faults = append $faults (printf "%s.resources: requests and limits of GPUs must be equal" $name) -}}
{{- end -}}
{{- range $label := keys (include "headrace.roleLabels" . | fromYaml) | sortAlpha -}}
{{- if hasKey (default dict $.role.podLabels) $label -}}
{{- $faults = append $faults (printf "%s.podLabels: %s selects the pods of a release and a role; choose another label" $name $label) -}}
{{- end -}}
{{- end -}}
{{- toJson $faults -}}
{{- end -}}

{{/* Number of GPUs in the limits of resources, and in the requests (default: the limits); as JSON. */}}
{{- define "headrace.gpus" -}}
{{- $count := 0 -}}
{{- $requested := 0 -}}
{{- range $name, $amount := .limits -}}
{{- if include "headrace.isGpu" $name -}}
{{- $count = add $count (int $amount) -}}
{{- $requested = add $requested (int (dig $name $amount (default dict $.requests))) -}}
{{- end -}}
{{- end -}}
{{- range $name, $amount := .requests -}}
{{- if and (include "headrace.isGpu" $name) (not (hasKey (default dict $.limits) $name)) -}}
{{- $requested = add $requested (int $amount) -}}
{{- end -}}
{{- end -}}
{{- dict "count" $count "requested" $requested | toJson -}}
{{- end -}}

{{/* Faults of the workers of one set, as a JSON list: root. */}}
{{- define "headrace.workerFaults" -}}
{{- $faults := list -}}
{{- $roles := dict -}}
{{- $replicas := dict -}}
{{- $names := dict -}}
{{- range $name := list "prefill" "decode" -}}
{{- $role := include "headrace.role" (dict "root" $ "name" $name) | fromJson -}}
{{- $context := dict "root" $ "name" $name "role" $role -}}
{{- $full := include "headrace.section" $context -}}
{{- $_ := set $roles $name $role -}}
{{- $_ := set $names $name $full -}}
{{- $_ := set $replicas $name (eq $role.autoscaling.type "none" | ternary $role.replicas $role.autoscaling.minReplicas | int) -}}
{{- $faults = concat $faults (include "headrace.roleFaults" $context | fromJsonArray) -}}
{{- $faults = concat $faults (include "headrace.deviceFaults" $context | fromJsonArray) -}}
{{- end -}}
{{- if include "headrace.modelJob" . -}}
{{- $context := dict "root" . "name" "model" "role" (include "headrace.role" (dict "root" . "name" "model") | fromJson) -}}
{{- $faults = concat $faults (include "headrace.deviceFaults" $context | fromJsonArray) -}}
{{- end -}}
{{- if and (not $replicas.decode) (ne "true" (toString $roles.prefill.settings.decodes)) -}}
{{- $faults = append $faults (printf "%s.replicas is 0, so no request can be served; only prefill workers with prefill.settings.decodes: true work alone" $names.decode) -}}
{{- end -}}
{{- if and (not $replicas.prefill) (not $roles.decode.settings.colocated) -}}
{{- $faults = append $faults (printf "%s.replicas is 0, so no request can be served; only decode workers with decode.settings.colocated: true work alone" $names.prefill) -}}
{{- end -}}
{{- if and $replicas.decode $replicas.prefill -}}
{{- range $setting, $default := dict "codebooks" "none" "kernel_plan_file" "none" "kv_eviction" "0" "kv_format" "dense" -}}
{{- $values := dict -}}
{{- range $name, $role := $roles -}}
{{- $_ := set $values $name (get $role.settings $setting | default $default | toString) -}}
{{- end -}}
{{- if ne $values.prefill $values.decode -}}
{{- $faults = append $faults (printf "settings.%s is %s for %s and %s for %s, so they cannot serve a request together; set it in workers.settings" $setting $values.prefill $names.prefill $values.decode $names.decode) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $model := .Values.model -}}
{{- if and $model.path (ne $model.path "smollm2-135m") (not $model.fetch.repository) (not (include "headrace.modelVolume" .)) -}}
{{- $path := printf "%smodel.path" (eq "green" (default "" .set) | ternary "blueGreen.green." "") -}}
{{- $faults = append $faults (printf "%s: no volume contains %s; set model.volume or model.claim, or download it with model.fetch.repository" $path $model.path) -}}
{{- end -}}
{{- toJson $faults -}}
{{- end -}}

{{/* Faults of the GPUs and of the image of a worker or of the model's Job, as a JSON list:
     (dict "root" root "name" role "role" values). */}}
{{- define "headrace.deviceFaults" -}}
{{- $faults := list -}}
{{- $name := include "headrace.section" . -}}
{{- $role := .role -}}
{{- $gpus := (include "headrace.gpus" $role.resources | fromJson).count -}}
{{- $image := mustMergeOverwrite (deepCopy .root.Values.image) $role.image -}}
{{- $ours := not (or $image.tag $image.digest) -}}
{{- $ranks := include "headrace.ranks" . | int -}}
{{- if and $gpus (ne (int $gpus) $ranks) -}}
{{- $why := eq .name "model" | ternary "the Job uses one" (printf "settings.tp is %v: a worker uses one GPU for each rank" $ranks) -}}
{{- $faults = append $faults (printf "%s.resources: %v GPUs, but %s" $name $gpus $why) -}}
{{- end -}}
{{- if gt $ranks 1 -}}
{{- $range := splitList "-" .root.Values.transfer.ports -}}
{{- if gt $ranks (sub (last $range | int) (first $range | int) | add1 | int) -}}
{{- $faults = append $faults (printf "transfer.ports: %s has fewer ports than %s has ranks (%v), each of which needs one" .root.Values.transfer.ports $name $ranks) -}}
{{- end -}}
{{- range $resource := keys (default dict $role.resources.limits) | sortAlpha -}}
{{- if and (include "headrace.isGpu" $resource) (ne $resource "nvidia.com/gpu") -}}
{{- $faults = append $faults (printf "%s.resources: %s is a part of a GPU; ranks need whole ones, nvidia.com/gpu" $name $resource) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $gpus (or (eq "cpu" (toString $role.settings.device)) (and $ours (ne $image.flavor "cuda"))) -}}
{{- $faults = append $faults (printf "%s.resources: the GPU is not used, with image.flavor %s and device %s; GPUs need workers.image.flavor cuda" $name $image.flavor (default "auto" $role.settings.device)) -}}
{{- end -}}
{{- if and (eq "splitzip" (toString $role.settings.codec)) (not (or $role.settings.codebooks (include "headrace.codebooks" .root))) -}}
{{- $faults = append $faults (printf "%s.settings.codec splitzip needs codebooks: set model.prepare.codebooks" $name) -}}
{{- end -}}
{{- if and $ours (eq $image.flavor "control") -}}
{{- $faults = append $faults (printf "%s.image.flavor: the image control has no workers; use cpu or cuda" $name) -}}
{{- end -}}
{{- toJson $faults -}}
{{- end -}}

{{/* Faults of port numbers, as a JSON list: root. */}}
{{- define "headrace.portFaults" -}}
{{- $faults := list -}}
{{- $range := splitList "-" .Values.transfer.ports -}}
{{- $low := first $range | int -}}
{{- $high := last $range | int -}}
{{- if or (lt $low 1) (gt $low $high) (gt $high 65535) -}}
{{- $faults = append $faults (printf "transfer.ports: %s is not a range of ports such as 21000-21015" .Values.transfer.ports) -}}
{{- end -}}
{{- range $name, $port := include "headrace.ports" (dict "root" . "name" "decode") | fromYaml -}}
{{- if and (le $low (int $port)) (le (int $port) $high) -}}
{{- $faults = append $faults (printf "transfer.ports: %s contains %v, the port %s of workers" $.Values.transfer.ports $port $name) -}}
{{- end -}}
{{- end -}}
{{- with .Values.gateway.service -}}
{{- if eq (int .port) (int .grpcPort) -}}
{{- $faults = append $faults (printf "gateway.service: port and grpcPort are both %v" .port) -}}
{{- end -}}
{{- end -}}
{{- toJson $faults -}}
{{- end -}}

{{/* Faults of the names of models, as a JSON list: root. Routers tell the models of two sets apart by their
     names. */}}
{{- define "headrace.nameFaults" -}}
{{- $faults := list -}}
{{- $models := dict -}}
{{- range $set, $values := include "headrace.sets" . | fromJson -}}
{{- $root := set (omit $ "Values") "Values" $values -}}
{{- $path := include "headrace.modelPath" $root -}}
{{- $model := dict "path" $path "name" (default (base $path | trimSuffix ".gguf") (include "headrace.servedName" $root)) -}}
{{- range $other := values $models -}}
{{- if and (eq $other.name $model.name) (ne $other.path $model.path) -}}
{{- $faults = append $faults (printf "blueGreen: both sets serve a model under the name %s; set blueGreen.green.model.servedName" $model.name) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $models $set $model -}}
{{- end -}}
{{- toJson $faults -}}
{{- end -}}

{{/* Faults of names, labels and Secrets of the release, as a JSON list: root. */}}
{{- define "headrace.releaseFaults" -}}
{{- $faults := list -}}
{{- $name := include "headrace.fullname" . -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $name) -}}
{{- $faults = append $faults (printf "%s cannot be the name of a Service, which consists of a-z, 0-9 and -, and begins with a letter; set fullnameOverride" $name) -}}
{{- end -}}
{{- $plain := set (omit . "Values") "Values" (omit .Values "commonLabels") -}}
{{- range $label := append (keys (include "headrace.labels" $plain | fromYaml)) "app.kubernetes.io/component" | sortAlpha -}}
{{- if hasKey (default dict $.Values.commonLabels) $label -}}
{{- $faults = append $faults (printf "commonLabels: the chart sets %s; choose another label" $label) -}}
{{- end -}}
{{- end -}}
{{- with .Values.auth -}}
{{- if and .clusterToken.existingSecret (or .clusterToken.value .clusterToken.secondValue) -}}
{{- $faults = append $faults "auth.clusterToken: value and secondValue have no effect with existingSecret; change the data of that Secret" -}}
{{- end -}}
{{- if and .apiKeys.existingSecret .apiKeys.hashes -}}
{{- $faults = append $faults "auth.apiKeys: hashes have no effect with existingSecret; add them to that Secret" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.enabled) -}}
{{- $faults = append $faults "tls.certManager.enabled has no effect without tls.enabled" -}}
{{- end -}}
{{- toJson $faults -}}
{{- end -}}

{{/* Refuse a pod that an API server refuses, or in which a device is not used: (dict "name" path of the
     values "spec" spec of the pod). */}}
{{- define "headrace.checkPod" -}}
{{- $named := dict "volumes" list "containers" list "ports" list -}}
{{- range .spec.volumes -}}{{- $_ := set $named "volumes" (append $named.volumes .name) -}}{{- end -}}
{{- $claimed := list -}}
{{- range concat (default list .spec.initContainers) .spec.containers -}}
{{- $box := .name -}}
{{- $_ := set $named "containers" (append $named.containers $box) -}}
{{- $lists := dict "env" list "volumeMounts" list -}}
{{- range .env -}}{{- $_ := set $lists "env" (append $lists.env .name) -}}{{- end -}}
{{- range .volumeMounts -}}{{- $_ := set $lists "volumeMounts" (append $lists.volumeMounts .mountPath) -}}{{- end -}}
{{- range .ports -}}
{{- $_ := set $named "ports" (append $named.ports (printf "%v %s" .containerPort (default "TCP" .protocol))) -}}
{{- end -}}
{{- range dig "resources" "claims" list . -}}{{- $claimed = append $claimed .name -}}{{- end -}}
{{- range $field, $items := $lists -}}
{{- include "headrace.distinct" (list (printf "%s: container %s: %s" $.name $box $field) $items) -}}
{{- end -}}
{{- end -}}
{{- range $field, $items := $named -}}
{{- include "headrace.distinct" (list (printf "%s: %s" $.name $field) $items) -}}
{{- end -}}
{{- $claims := list -}}
{{- range .spec.resourceClaims -}}{{- $claims = append $claims .name -}}{{- end -}}
{{- range $claims -}}
{{- if not (has . $claimed) -}}
{{- fail (printf "%s.resourceClaims: no container uses %s; name it in %s.resources.claims" $.name . $.name) -}}
{{- end -}}
{{- end -}}
{{- range $claimed -}}
{{- if not (has . $claims) -}}
{{- fail (printf "%s.resources.claims: %s is not in %s.resourceClaims" $.name . $.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuse a list with equal items: (list what items). */}}
{{- define "headrace.distinct" -}}
{{- $items := last . -}}
{{- range $index, $item := $items -}}
{{- if has $item (slice $items 0 $index) -}}
{{- fail (printf "%s: %v occurs twice" (first $) $item) -}}
{{- end -}}
{{- end -}}
{{- end -}}
