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

{{- /* Not empty if the nodes get a policy with a store in the Kubernetes API. */}}
{{- define "has-api" -}}
{{- if .Values.cni.install }}
{{- range .Values.policy.stores }}{{ if eq (toString .type) "kubernetes" }}yes{{ end }}{{ end }}
{{- end }}
{{- end }}

{{- /* Not empty if the agent writes RdmaNodes. */}}
{{- define "has-rdma-nodes" -}}
{{- if and .Values.rdmaNodes.enabled (not .Values.uninstall.enabled) }}yes{{ end }}
{{- end }}

{{- /* Not empty if the agent changes its Node. */}}
{{- define "has-marks" -}}
{{- if and (include "has-rdma-nodes" .) (or .Values.rdmaNodes.nodeCondition .Values.rdmaNodes.taintMissing .Values.rdmaNodes.nodeLabels) }}
{{- if not .Values.admission.enabled }}
{{- fail "rdmaNodes.nodeCondition, taintMissing and nodeLabels need admission.enabled, which limits each agent to its own Node" }}
{{- end }}yes
{{- end }}
{{- end }}

{{- /* Not empty if the agent writes labels for node-feature-discovery. */}}
{{- define "has-features" -}}
{{- if .Values.rdmaNodes.nodeFeatures }}{{ include "has-rdma-nodes" . }}{{ end }}
{{- end }}

{{- define "features-dir" -}}
/etc/kubernetes/node-feature-discovery/features.d
{{- end }}

{{- /* Not empty if the agent has a token. */}}
{{- define "has-token" -}}
{{- include "has-api" . }}{{ include "has-rdma-nodes" . }}
{{- end }}

{{- /* Not empty if there is an agent: it has a token, or the nodes get a policy with a shared directory. */}}
{{- define "has-agent" -}}
{{- include "has-token" . }}
{{- if .Values.cni.install }}
{{- range .Values.policy.stores }}{{ if .directory }}yes{{ end }}{{ end }}
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
{{- if and (eq $store.type "kubernetes") (hasKey $store "directory") }}
{{- fail (printf "policy.stores.%s: a store of type kubernetes cannot have the key directory; set it to null" $name) }}
{{- end }}
{{- if and $store.directory (not $.Values.sharedStore) (not $.Values.extraVolumeMounts) }}
{{- fail (printf "policy.stores.%s: set sharedStore to the mount point of the file system that holds %s" $name $store.directory) }}
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
- name: node-socket
  mountPath: /run/rdma-netdev
# The leases, below the host's root.
- name: node-socket
  mountPath: /host/run/rdma-netdev
- name: cdi
  mountPath: {{ include "cdi-dir" . }}
- name: features
  mountPath: {{ include "features-dir" . }}
- name: netns
  mountPath: /run/netns
  mountPropagation: HostToContainer
  readOnly: true
{{- with .Values.extraVolumeMounts }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}

{{- define "agent-container" -}}
image: {{ include "image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [/usr/local/bin/rdma-agent]
env:
{{- include "node-name" . | nindent 0 }}
- name: HOST_IP
  valueFrom:
    fieldRef:
      fieldPath: status.hostIP
{{- if include "has-rdma-nodes" . }}
- name: RDMA_AGENT_RDMA_NODE
  value: "true"
{{- if .Values.rdmaNodes.nodeCondition }}
- name: RDMA_AGENT_NODE_CONDITION
  value: "true"
{{- end }}
{{- if .Values.rdmaNodes.taintMissing }}
- name: RDMA_AGENT_TAINT_MISSING
  value: "true"
{{- end }}
{{- if .Values.rdmaNodes.nodeLabels }}
- name: RDMA_AGENT_NODE_LABELS
  value: "true"
{{- end }}
{{- end }}
- name: RDMA_AGENT_METRICS_ADDR
  value: 127.0.0.1:{{ .Values.agent.metricsPort }},$(HOST_IP):{{ .Values.agent.metricsPort }}
ports:
- name: agent-metrics
  containerPort: {{ .Values.agent.metricsPort }}
startupProbe:
  httpGet: {host: 127.0.0.1, path: /healthz, port: agent-metrics}
  initialDelaySeconds: 1
  periodSeconds: 1
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {host: 127.0.0.1, path: /healthz, port: agent-metrics}
  periodSeconds: 30
  timeoutSeconds: 5
  failureThreshold: 4
# Root owns the files that it writes.
securityContext:
  runAsUser: 0
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
  seccompProfile:
    type: RuntimeDefault
resources:
  {{- toYaml .Values.agent.resources | nindent 2 }}
volumeMounts:
{{- if include "has-token" . }}
- name: agent-token
  mountPath: /var/run/secrets/kubernetes.io/serviceaccount
  readOnly: true
{{- end }}
- name: policy
  mountPath: /etc/rdma-netdev
  readOnly: true
- name: state
  mountPath: {{ include "state-dir" . }}
# Its socket, and the leases of the node.
- name: node-socket
  mountPath: /run/rdma-netdev
{{- if include "has-features" . }}
- name: features
  mountPath: {{ include "features-dir" . }}
{{- end }}
{{- with .Values.sharedStore }}
# The mount point, so that a later mount of the node appears here.
- name: shared-store
  mountPath: {{ . }}
  mountPropagation: HostToContainer
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}
