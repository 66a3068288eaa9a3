{{- define "latchkey.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* Short enough that the longest suffix, "-operator-watched", still makes a label. */ -}}
{{- define "latchkey.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 44 | trimSuffix "-" }}
{{- else if contains (include "latchkey.name" .) .Release.Name }}
{{- .Release.Name | trunc 44 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "latchkey.name" .) | trunc 44 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- /* For objects that are not of a namespace: two installs of one release name do not meet. */ -}}
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

{{- /* The Lease that the operator's replicas share. */ -}}
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

{{- /* The headless Service by which the operator finds the servers' pods. */ -}}
{{- define "latchkey.server.opsService" -}}
{{- printf "%s-ops" (include "latchkey.server.fullname" .) }}
{{- end }}
