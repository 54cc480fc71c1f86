{{- define "rs.name" -}}
{{- if .Values.nameOverride -}}{{ .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains .Chart.Name .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- /* Labels that never change: selectors of Deployments cannot. */ -}}
{{- define "rs.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "rs.labels" -}}
{{ include "rs.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- /* The component that runs a part: with allInOne it is one for all of them. */ -}}
{{- define "rs.component" -}}
{{- if .root.Values.allInOne }}supervisor{{ else }}{{ .part }}{{ end -}}
{{- end -}}

{{- define "rs.image" -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{- define "rs.workloadNamespace" -}}
{{ .Values.workloadNamespace | default .Release.Namespace }}
{{- end -}}

{{- define "rs.controlSecret" -}}
{{- if eq .Values.tls.mode "secrets" }}{{ required "tls.secrets.control must name a Secret when tls.mode is secrets" .Values.tls.secrets.control }}
{{- else }}{{ include "rs.name" . }}-control-tls{{ end -}}
{{- end -}}

{{- define "rs.hostSecret" -}}
{{- if eq .Values.tls.mode "secrets" }}{{ required "tls.secrets.host must name a Secret when tls.mode is secrets" .Values.tls.secrets.host }}
{{- else }}{{ include "rs.name" . }}-host-tls{{ end -}}
{{- end -}}

{{- define "rs.aliveEnv" -}}
- {name: RESILIENCY_ALIVE_FILE, value: /tmp/alive}
{{- end -}}

{{- define "rs.liveness" -}}
# A program that is stopped, or waits for ever, accepts connections as before: it is asked for its own word.
exec: {command: [sh, -c, 'test -n "$(find "$RESILIENCY_ALIVE_FILE" -mmin -1)"']}
periodSeconds: 20
timeoutSeconds: 10
failureThreshold: 6
{{- end -}}

{{- define "rs.tlsEnv" -}}
{{- if eq .Values.tls.mode "plaintext" }}
- {name: SUPERVISOR_PLAINTEXT, value: "1"}
{{- else }}
- {name: SUPERVISOR_TLS_CA, value: /etc/resiliency/tls/ca.crt}
- {name: SUPERVISOR_TLS_CERT, value: /etc/resiliency/tls/tls.crt}
- {name: SUPERVISOR_TLS_KEY, value: /etc/resiliency/tls/tls.key}
{{- end }}
{{- end -}}

{{- define "rs.tlsMount" -}}
{{- if ne .Values.tls.mode "plaintext" }}
- {name: tls, mountPath: /etc/resiliency/tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "rs.tlsVolume" -}}
{{- if ne .root.Values.tls.mode "plaintext" }}
- name: tls
  secret: {secretName: {{ .secret }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{- /* Security of containers that need no right at all. */ -}}
{{- define "rs.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "rs.thresholds" -}}
{{- range $name, $value := .Values.thresholds }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end -}}

{{- define "rs.parts" -}}
{{- if .Values.allInOne }}supervisor{{ else }}sensor,controller,actuator{{ end -}}
{{- end -}}


{{- /* Lets the nodes of the cluster reach ports of a part, where networks know them by what they are. */ -}}
{{- define "rs.nodePolicy" }}
---
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata:
  name: {{ .root.Release.Namespace }}-{{ include "rs.name" .root }}-{{ .part }}
  labels: {{- include "rs.labels" . | nindent 4 }}
spec:
  endpointSelector:
    matchLabels:
      k8s:io.kubernetes.pod.namespace: {{ .root.Release.Namespace }}
      {{- include "rs.selector" . | nindent 6 }}
  ingress:
    - fromEntities: [host, remote-node]
      toPorts:
        - ports:
            {{- range .ports }}
            - {port: {{ . | quote }}, protocol: TCP}
            {{- end }}
{{- end -}}
