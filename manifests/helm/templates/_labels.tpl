{{- define "selector" -}}
app.kubernetes.io/name: rdma-device-plugin
{{- if ne .Release.Name "rdma-device-plugin" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- end }}

{{- define "labels" -}}
{{ include "selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "broker" -}}
{{ ternary "rdma-ipam-broker" (printf "%s-ipam-broker" .Release.Name) (eq .Release.Name "rdma-device-plugin") }}
{{- end }}

{{- define "image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
