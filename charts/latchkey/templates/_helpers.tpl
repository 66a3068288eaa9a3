{{- define "latchkey.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* Truncated so that the longest name, which has the suffix "-operator-watched", has at most 63 characters. */ -}}
{{- define "latchkey.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 44 | trimSuffix "-" }}
{{- else if contains (include "latchkey.name" .) .Release.Name }}
{{- .Release.Name | trunc 44 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "latchkey.name" .) | trunc 44 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- /* The name of cluster-scoped objects. With the namespace in it, releases with the same name do not conflict. */ -}}
{{- define "latchkey.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "latchkey.fullname" .) }}
{{- end }}

{{- define "latchkey.chart" -}}
{{- printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "latchkey.labels" -}}
helm.sh/chart: {{ include "latchkey.chart" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: {{ include "latchkey.name" . }}
{{- end }}

{{- define "latchkey.operator.fullname" -}}
{{- printf "%s-operator" (include "latchkey.fullname" .) }}
{{- end }}

{{- define "latchkey.operator.selectorLabels" -}}
app.kubernetes.io/name: {{ include "latchkey.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "latchkey.operator.labels" -}}
{{ include "latchkey.operator.selectorLabels" . }}
{{ include "latchkey.labels" . }}
{{- end }}

{{- define "latchkey.operator.serviceAccountName" -}}
{{- default (include "latchkey.operator.fullname" .) .Values.operator.serviceAccount.name }}
{{- end }}

{{- /* The name of the Lease by which the replicas of the operator choose their leader. */ -}}
{{- define "latchkey.operator.lease" -}}
{{- include "latchkey.operator.fullname" . }}
{{- end }}

{{- define "latchkey.server.fullname" -}}
{{- printf "%s-server" (include "latchkey.fullname" .) }}
{{- end }}

{{- define "latchkey.server.selectorLabels" -}}
app.kubernetes.io/name: {{ include "latchkey.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "latchkey.server.labels" -}}
{{ include "latchkey.server.selectorLabels" . }}
{{ include "latchkey.labels" . }}
{{- end }}

{{- define "latchkey.server.serviceAccountName" -}}
{{- default (include "latchkey.server.fullname" .) .Values.server.serviceAccount.name }}
{{- end }}

{{- /* The headless Service through which the operator and Prometheus find the server pods. */ -}}
{{- define "latchkey.server.opsService" -}}
{{- printf "%s-ops" (include "latchkey.server.fullname" .) }}
{{- end }}

{{- /* The host of baseURL, without its port. */ -}}
{{- define "latchkey.host" -}}
{{- (urlParse .Values.baseURL).host | splitList ":" | first }}
{{- end }}

{{- /* An image by digest, tag, or appVersion of the chart. The argument: a dict of image and root. */ -}}
{{- define "latchkey.image" -}}
{{- if .image.digest }}
{{- printf "%s@%s" .image.repository .image.digest }}
{{- else }}
{{- printf "%s:%s" .image.repository (default .root.Chart.AppVersion .image.tag) }}
{{- end }}
{{- end }}

{{- /* Security contexts of a pod and of a container for the Pod Security level `restricted`. */ -}}
{{- define "latchkey.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "latchkey.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- /* malloc uses one arena and returns free memory to the system (docs/decisions/0011). */ -}}
{{- define "latchkey.malloc" -}}
- name: GLIBC_TUNABLES
  value: glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=131072
{{- end }}

{{- /*
Scheduling fields and imagePullSecrets of a pod. The argument: a dict of values (of the operator or the server), labels
(of its selector) and root.
*/ -}}
{{- define "latchkey.scheduling" -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
topologySpreadConstraints:
{{- if .values.topologySpreadConstraints }}
  {{- toYaml .values.topologySpreadConstraints | nindent 2 }}
{{- else }}
{{- $labels := .labels }}
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    # During a rollout, pods of the old and the new ReplicaSet are spread separately.
    matchLabelKeys: [pod-template-hash]
    labelSelector:
      matchLabels:
        {{- $labels | nindent 8 }}
{{- end }}
{{- end }}
{{- end }}

{{- /* A volume with one key of a Secret as a file. The argument: a dict of name, secret, key and path (default: url). */ -}}
{{- define "latchkey.secretVolume" -}}
- name: {{ .name }}
  secret:
    secretName: {{ .secret }}
    # The octal number 0440, written in decimal: YAML 1.2 would read 0440 as the decimal number 440.
    defaultMode: 288
    items:
      - key: {{ .key }}
        path: {{ default "url" .path }}
{{- end }}

{{- /*
Additional CA certificates, under two file names: ca.crt for the URL of Postgres, and 00000000.0 for SSL_CERT_DIR, in
which only files with names in the format of c_rehash are read.
*/ -}}
{{- define "latchkey.caVolume" -}}
{{- with .Values.caBundle }}
{{- if or .configMap .secret }}
- name: ca
  {{- if .configMap }}
  configMap:
    name: {{ .configMap }}
  {{- else }}
  secret:
    secretName: {{ .secret }}
  {{- end }}
    items:
      - key: {{ .key }}
        path: ca.crt
      - key: {{ .key }}
        path: "00000000.0"
{{- end }}
{{- end }}
{{- end }}

{{- define "latchkey.caMount" -}}
{{- if or .Values.caBundle.configMap .Values.caBundle.secret }}
- name: ca
  mountPath: /etc/latchkey/ca
  readOnly: true
{{- end }}
{{- end }}

{{- define "latchkey.caEnv" -}}
{{- if or .Values.caBundle.configMap .Values.caBundle.secret }}
- name: SSL_CERT_FILE
  value: /etc/ssl/certs/ca-certificates.crt
- name: SSL_CERT_DIR
  value: /etc/latchkey/ca
{{- end }}
{{- end }}

{{- /* The standard variables of OpenTelemetry for the export of spans. */ -}}
{{- define "latchkey.tracingEnv" -}}
{{- with .Values.tracing }}
{{- if .endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .endpoint | quote }}
- name: OTEL_EXPORTER_OTLP_PROTOCOL
  value: {{ .protocol }}
- name: OTEL_TRACES_SAMPLER
  value: {{ .sampler }}
{{- with .samplerArgument | toString }}
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ . | quote }}
{{- end }}
{{- with .headers }}
{{- if .existingSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
{{- end }}
{{- end }}
- name: K8S_POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name={{ $.Release.Namespace }},k8s.pod.name=$(K8S_POD_NAME)
{{- end }}
{{- end }}
{{- end }}

{{- define "latchkey.proxyEnv" -}}
{{- with .Values.proxy }}
{{- if or .httpsProxy .existingSecret }}
- name: HTTPS_PROXY
  {{- if .httpsProxy }}
  value: {{ .httpsProxy | quote }}
  {{- else }}
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
  {{- end }}
{{- with .noProxy }}
- name: NO_PROXY
  value: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "latchkey.server.adminService" -}}
{{- printf "%s-admin" (include "latchkey.server.fullname" .) }}
{{- end }}

{{- /* The headless Service through which Prometheus and the Helm test find the operators. */ -}}
{{- define "latchkey.operator.opsService" -}}
{{- printf "%s-ops" (include "latchkey.operator.fullname" .) }}
{{- end }}

{{- /*
The number of replicas to keep when an autoscaler replaces a fixed number. If the chart removed `replicas` while Helm is
the only owner of the field, the API server would set the field to 1. So the chart sets the current number until the
autoscaler has set one and owns the field. Empty: nothing to keep.
*/ -}}
{{- define "latchkey.server.keptReplicas" -}}
{{- $deployment := lookup "apps/v1" "Deployment" .Release.Namespace (include "latchkey.server.fullname" .) }}
{{- if $deployment }}
{{- $autoscalerOwnsReplicas := false }}
{{- range $deployment.metadata.managedFields }}
{{- if and .fieldsV1 (eq (default "" .subresource) "scale") (hasKey (default dict (index .fieldsV1 "f:spec")) "f:replicas") }}
{{- $autoscalerOwnsReplicas = true }}
{{- end }}
{{- end }}
{{- if not $autoscalerOwnsReplicas }}
{{- $deployment.spec.replicas }}
{{- end }}
{{- end }}
{{- end }}

{{- define "latchkey.bindAddress" -}}
{{- if contains ":" .Values.bindAddress }}[{{ .Values.bindAddress }}]{{ else }}{{ .Values.bindAddress }}{{ end }}
{{- end }}

{{- define "latchkey.test.selectorLabels" -}}
app.kubernetes.io/name: {{ include "latchkey.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
{{- end }}
