{{- define "sidestep.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "sidestep.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "sidestep.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "sidestep.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "sidestep.selector" -}}
app.kubernetes.io/name: {{ include "sidestep.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sidestep.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "sidestep.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Name, namespace and labels of an object; called with a list of the root and the ending of the name. */ -}}
{{- define "sidestep.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "sidestep.fullname" $root }}{{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "sidestep.labels" $root | nindent 2 }}
{{- end -}}

{{- define "sidestep.image" -}}
{{- $registry := .Values.global.imageRegistry | default .Values.image.registry -}}
{{- with $registry }}{{ . }}/{{ end -}}
{{- .Values.image.repository -}}
{{- if .Values.image.digest -}}
@{{ .Values.image.digest }}
{{- else -}}
:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- /* A line of its own, or nothing; called with the root and the depth. */ -}}
{{- define "sidestep.pullSecrets" -}}
{{- $root := index . 0 -}}
{{- with concat $root.Values.global.imagePullSecrets $root.Values.imagePullSecrets | uniq -}}
{{- printf "imagePullSecrets:\n%s" (toYaml . | indent 2) | nindent (index $ 1) -}}
{{- end -}}
{{- end -}}

{{- define "sidestep.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "sidestep.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "sidestep.tlsSecret" -}}
{{- if eq .Values.tls.mode "certManager" -}}
{{- include "sidestep.fullname" . }}-tls
{{- else -}}
{{- required "tls.secretName: expected the name of a Secret, which tls.mode secret needs, found none" .Values.tls.secretName -}}
{{- end -}}
{{- end -}}

{{- define "sidestep.tlsFromSecret" -}}
{{- if has .Values.tls.mode (list "secret" "certManager") }}true{{ end -}}
{{- end -}}

{{- /* A duration such as 1m30s in whole seconds, rounded up. */ -}}
{{- define "sidestep.seconds" -}}
{{- $units := dict "h" 3600.0 "m" 60.0 "s" 1.0 "ms" 0.001 -}}
{{- $total := 0.0 -}}
{{- range regexFindAll "[0-9.]+(ms|h|m|s)" . -1 -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- $total = addf $total (mulf (trimSuffix $unit . | float64) (get $units $unit)) -}}
{{- end -}}
{{- ceil $total | int -}}
{{- end -}}

{{- define "sidestep.pool" -}}
{{- .Values.pool.name | default (include "sidestep.fullname" .) -}}
{{- end -}}

{{- define "sidestep.lease" -}}
{{ include "sidestep.fullname" . }}-status
{{- end -}}

{{- /* Name of the Service of engine pods. */ -}}
{{- define "sidestep.engines" -}}
{{- .Values.gateway.engines.existingService | default (printf "%s-engines" (include "sidestep.fullname" .)) -}}
{{- end -}}

{{- /* The route's parents. */ -}}
{{- define "sidestep.parents" -}}
{{- if .Values.gateway.route.parentRefs -}}
{{- toYaml .Values.gateway.route.parentRefs -}}
{{- else if .Values.gateway.gateway.create -}}
- name: {{ include "sidestep.fullname" . }}
{{- else -}}
{{- fail "gateway.route.parentRefs: expected a Gateway, or gateway.gateway.create, found neither" -}}
{{- end -}}
{{- end -}}

{{- /* Headers that no client may send: they would be obeyed before the picker could remove them. */ -}}
{{- define "sidestep.forbiddenHeaders" -}}
- x-gateway-destination-endpoint
- x-gateway-destination-endpoint-served
- x-gateway-destination-endpoint-subset
- x-prefiller-host-port
- x-prefiller-url
- x-decoder-host-port
- x-encoder-hosts-ports
- x-kv-cache-source-host-port
- x-data-parallel-host-port
- x-data-parallel-rank
- x-sidestep-bypass
- x-sidestep-decision
{{- end -}}

{{- define "sidestep.config" -}}
apiVersion: sidestep.dev/v1alpha1
kind: SidestepConfig
listen:
  extProc: {{ printf "%s:9002" .Values.listenAddress | quote }}
  health: {{ printf "%s:9003" .Values.listenAddress | quote }}
  admin: {{ printf "%s:9090" .Values.listenAddress | quote }}
tls:
  {{- if eq .Values.tls.mode "plaintext" }}
  mode: Plaintext
  {{- else if eq .Values.tls.mode "selfSigned" }}
  mode: SelfSigned
  {{- else }}
  mode: Files
  certFile: /etc/sidestep-tls/tls.crt
  keyFile: /etc/sidestep-tls/tls.key
  {{- end }}
limits:
  {{- toYaml .Values.limits | nindent 2 }}
index:
  maxBlocks: {{ .Values.index.maxBlocks | int64 }}
  maxBlocksPerPod: {{ .Values.index.maxBlocksPerPod | int64 }}
{{- with .Values.models }}
models:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if eq .Values.pods.source "static" }}
pods: {file: pods.yaml}
{{- else }}
{{- with .Values.pods.kubernetes }}
pods:
  kubernetes:
    pool: {{ include "sidestep.pool" $ }}
    roleLabel: {{ .roleLabel }}
    {{- with .roles }}
    roles:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with .unlabelled }}
    unlabelled: {{ . }}
    {{- end }}
    {{- if .kvEvents.port }}
    kvEvents:
      port: {{ .kvEvents.port }}
      {{- with .kvEvents.replayPort }}
      replayPort: {{ . }}
      {{- end }}
      {{- with .kvEvents.topic }}
      topic: {{ . | quote }}
      {{- end }}
    {{- end }}
    {{- with .template }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}
{{- if eq .Values.policy.source "configMap" }}
policy: {file: policy.yaml}
{{- else }}
policy:
  kubernetes:
    pool: {{ include "sidestep.pool" . }}
    lease: {{ include "sidestep.lease" . }}
{{- end }}
telemetry:
  {{- with .Values.telemetry.otlpEndpoint }}
  otlpEndpoint: {{ . | quote }}
  sampleRatio: {{ $.Values.telemetry.sampleRatio }}
  {{- with $.Values.telemetry.resource }}
  resource:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  serviceName: {{ .Values.telemetry.serviceName | quote }}
{{- end -}}

{{- /* Whether the picker talks to the Kubernetes API. */ -}}
{{- define "sidestep.usesApi" -}}
{{- or (eq .Values.pods.source "kubernetes") (eq .Values.policy.source "kubernetes") -}}
{{- end -}}

{{- /* The name that gateways reach the picker under, and that its certificate bears. */ -}}
{{- define "sidestep.host" -}}
{{ include "sidestep.fullname" . }}.{{ .Release.Namespace }}.svc.cluster.local
{{- end -}}

{{- /* Where `helm test` sends its request; empty: nowhere. */ -}}
{{- define "sidestep.testUrl" -}}
{{- if .Values.test.url -}}
{{- .Values.test.url -}}
{{- else if eq .Values.gateway.mode "envoyGateway" -}}
{{- $parent := include "sidestep.parents" . | fromYamlArray | first -}}
{{- $namespace := $parent.namespace | default .Release.Namespace -}}
{{- $id := printf "%s/%s" $namespace $parent.name -}}
{{- $port := (first .Values.gateway.gateway.listeners).port -}}
{{- /* The name that Envoy Gateway gives the Service of a Gateway. */ -}}
http://envoy-{{ $id | replace "/" "-" | trunc 48 }}-{{ $id | sha256sum | trunc 8 }}.{{ .Values.gateway.envoyGateway.namespace }}.svc.cluster.local:{{ $port }}
{{- end -}}
{{- end -}}
