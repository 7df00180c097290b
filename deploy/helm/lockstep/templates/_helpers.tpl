{{- define "lockstep.name" -}}
{{- $name := .Release.Name -}}
{{- if not (contains .Chart.Name $name) }}{{ $name = printf "%s-%s" $name .Chart.Name }}{{ end -}}
{{- $name | trunc 52 | trimSuffix "-" -}}
{{- end }}

{{- define "lockstep.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: engine
{{- end }}

{{- define "lockstep.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "lockstep.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "lockstep.name" .) -}}
{{- end }}

{{- define "lockstep.tokensSecret" -}}
{{- if .Values.auth.secretName }}{{ .Values.auth.secretName }}
{{- else if .Values.auth.tokens }}{{ include "lockstep.name" . }}-tokens{{ end -}}
{{- end }}

{{/* A setting as the text of an environment variable. Numbers of values are floats, whose text may have an exponent. */}}
{{- define "lockstep.setting" -}}
{{- if kindIs "slice" . }}{{ join "\n" . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}
{{- else }}{{ . }}{{ end -}}
{{- end }}

{{/* What every container of this chart may do: compute, and write to its volumes. */}}
{{- define "lockstep.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "lockstep.podSecurity" -}}
# A Service whose name begins with lockstep would else set variables that the processes read as settings.
enableServiceLinks: false
{{- with .Values.images.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "lockstep.check" -}}
{{- $v := .Values -}}
{{- if and $v.auth.secretName $v.auth.tokens }}{{ fail "auth: secretName and tokens exclude each other" }}{{ end -}}
{{- if and $v.tls.clientCAKey (not $v.tls.secretName) }}{{ fail "tls.clientCAKey: needs tls.secretName" }}{{ end -}}
{{- if and $v.smg.enabled (or $v.tls.secretName (include "lockstep.tokensSecret" .)) -}}
{{- fail "smg: it reaches engines without TLS and tokens; leave out tls and auth, and bound its peers with networkPolicy" -}}
{{- end -}}
{{- if and $v.inferencePool.enabled (not $v.http.enabled) }}{{ fail "inferencePool: needs http.enabled" }}{{ end -}}
{{- if and $v.inferencePool.enabled (not $v.inferencePool.endpointPicker.name) -}}
{{- fail "inferencePool.endpointPicker.name: is required" -}}
{{- end -}}
{{- if and $v.probes.readyMeansGuided (not $v.grammar.enabled) -}}
{{- fail "probes.readyMeansGuided: needs grammar.enabled" -}}
{{- end -}}
{{- range $name := list "listen" "health_listen" "http" "grammar" "grammar_dir" "metrics_listen" "drain_timeout_s" "tls_cert" "tls_key" "tls_client_ca" "auth_token_file" "model" -}}
{{- if hasKey $v.engine.settings $name }}{{ fail (printf "engine.settings.%s: the chart sets it from other values" $name) }}{{ end -}}
{{- end -}}
{{- range $name := list "dir" "backend" "health_listen" -}}
{{- if hasKey $v.grammar.settings $name }}{{ fail (printf "grammar.settings.%s: the chart sets it from other values" $name) }}{{ end -}}
{{- end -}}
{{- end }}
