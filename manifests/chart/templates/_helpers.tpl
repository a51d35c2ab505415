{{- define "selector" -}}
app.kubernetes.io/name: rdma-netdev
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "labels" -}}
{{ include "selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* Not empty if the nodes get a policy with a store of type kubernetes: then there is a broker. */}}
{{- define "has-broker" -}}
{{- if .Values.cni.install }}
{{- range .Values.policy.stores }}{{ if eq (toString .type) "kubernetes" }}yes{{ end }}{{ end }}
{{- end }}
{{- end }}

{{- define "state-dir" -}}
{{ .Values.policy.stateDir | default "/var/lib/rdma-netdev" }}
{{- end }}

{{- define "cdi-dir" -}}
{{ .Values.policy.cdiDir | default "/var/run/cdi" }}
{{- end }}

{{- /* JSON of a value, without the escapes that Go gives to < > &. */}}
{{- define "json" -}}
{{ toPrettyJson . | replace "\\u003c" "<" | replace "\\u003e" ">" | replace "\\u0026" "&" }}
{{- end }}

{{- define "pools" -}}
{{- if .Values.pools }}
{{- $formats := list }}
{{- range list "pools" "configList" "resourceList" }}
{{- if hasKey $.Values.pools . }}{{ $formats = append $formats . }}{{ end }}
{{- end }}
{{- if ne (len $formats) 1 }}
{{- fail (printf "pools must have one of the keys pools, configList and resourceList, not %v; set keys of another values file to null" $formats) }}
{{- end }}
{{- include "json" .Values.pools }}
{{- else -}}
{
  "version": 1,
  "pools": [
    {
      "resource": "rdma/hca_shared_devices_a",
      "mode": "shared",
      "shares": 63,
      "exclude": ["uplinks"],
      "select": {"functions": ["pf"], "linkTypes": ["ether"]}
    }
  ]
}
{{- end }}
{{- end }}

{{- define "policy" -}}
{{- range $name, $store := .Values.policy.stores }}
{{- $foreign := ternary (list "shared" "id") (list "after") (eq $store.type "kubernetes") }}
{{- range $foreign }}
{{- if hasKey $store . }}
{{- fail (printf "policy.stores.%s: a store of type %s cannot have the key %s; set it to null" $name $store.type .) }}
{{- end }}
{{- end }}
{{- end }}
{{- include "json" .Values.policy }}
{{- end }}

{{- define "node-name" -}}
- name: RDMA_NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- end }}

{{- define "uninstall-container" -}}
image: {{ include "image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
{{- include "node-name" . | nindent 0 }}
- name: RDMA_HOST_ROOT
  value: /host
- name: RDMA_CDI_DIR
  value: {{ include "cdi-dir" . }}
securityContext:
  runAsUser: 0
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    # The CNI directory can belong to another user (Kubespray).
    add: [DAC_OVERRIDE]
  seccompProfile:
    type: RuntimeDefault
resources:
  {{- toYaml .Values.resources | nindent 2 }}
volumeMounts:
- name: proc
  mountPath: /host/proc
  readOnly: true
- name: machine-id
  mountPath: /host/etc/machine-id
  readOnly: true
- name: cni-bin
  mountPath: /host/opt/cni/bin
- name: policy
  mountPath: /etc/rdma-netdev
- name: state
  mountPath: {{ include "state-dir" . }}
{{- with .Values.sharedStore }}
- name: shared-store
  mountPath: {{ . }}
  mountPropagation: HostToContainer
{{- end }}
- name: node-socket
  mountPath: /run/rdma-netdev
- name: cdi
  mountPath: {{ include "cdi-dir" . }}
- name: netns
  mountPath: /run/netns
  mountPropagation: HostToContainer
  readOnly: true
{{- with .Values.extraVolumeMounts }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}
