{{- define "paceline.name" -}}
{{- default .Release.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "paceline.labels" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "paceline.selector" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "paceline.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "paceline.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "paceline.name" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{- define "paceline.modelsClaim" -}}
{{ .Values.models.pvc.existingClaim | default (printf "%s-models" (include "paceline.name" .)) }}
{{- end -}}

{{/* The secret of a certificate; empty: there is none. */}}
{{- define "paceline.workersSecret" -}}
{{- with .Values.tls.workers -}}
{{ .existingSecret | default (ternary (printf "%s-workers-tls" (include "paceline.name" $)) "" (ne .issuer.name "")) }}
{{- end -}}
{{- end -}}

{{- define "paceline.serverSecret" -}}
{{- with .Values.tls.server -}}
{{ .existingSecret | default (ternary (printf "%s-server-tls" (include "paceline.name" $)) "" (ne .issuer.name "")) }}
{{- end -}}
{{- end -}}

{{/* The configuration as TOML. Helm reads each number of a values file as a float, so whole
numbers are made whole again. */}}
{{- define "paceline.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $server := dict "host" "0.0.0.0" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- $_ := set $server "api_keys" "/etc/paceline/keys/keys.jsonl" -}}
{{- end -}}
{{- if include "paceline.serverSecret" . -}}
{{- $_ := set $server "tls_cert" "/etc/paceline/server-tls/tls.crt" -}}
{{- $_ := set $server "tls_key" "/etc/paceline/server-tls/tls.key" -}}
{{- end -}}
{{- if include "paceline.workersSecret" . -}}
{{- $_ := set $config "workers" (merge (get $config "workers" | default dict) (dict "tls" "/etc/paceline/workers-tls")) -}}
{{- end -}}
{{- $_ := set $config "server" (merge (get $config "server" | default dict) $server) -}}
{{- $tables := $config.drafters | default list -}}
{{- range omit $config "drafters" -}}
{{- $tables = append $tables . -}}
{{- end -}}
{{- range $table := $tables -}}
{{- range $key, $value := $table -}}
{{- if and (kindIs "float64" $value) (eq (floor $value) $value) -}}
{{- $_ := set $table $key (int64 $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toToml $config -}}
{{- end -}}

{{- define "paceline.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "paceline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "paceline.env" -}}
- name: PACELINE_HOME
  value: /var/lib/paceline
- name: PACELINE_CONFIG
  value: /etc/paceline/paceline.toml
- name: HOME
  value: /tmp
- name: HF_HOME
  value: /var/lib/paceline/huggingface
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
{{- if .Values.apiKeys.existingSecret }}
- name: PACELINE_API_KEYS
  value: /etc/paceline/keys/keys.jsonl
- name: PACELINE_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .Values.apiKeys.existingSecret }}
      key: operator-key
{{- end }}
{{- if .Values.models.hubSecret }}
- name: HF_TOKEN_PATH
  value: /etc/paceline/hub/token
{{- end }}
{{- end -}}

{{- define "paceline.mounts" -}}
- name: config
  mountPath: /etc/paceline/paceline.toml
  subPath: paceline.toml
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: shared-memory
  mountPath: /dev/shm
- name: models
  mountPath: /var/lib/paceline
{{- if .Values.apiKeys.existingSecret }}
- name: keys
  mountPath: /etc/paceline/keys
  readOnly: true
{{- end }}
{{- if include "paceline.workersSecret" . }}
- name: workers-tls
  mountPath: /etc/paceline/workers-tls
  readOnly: true
{{- end }}
{{- if include "paceline.serverSecret" . }}
- name: server-tls
  mountPath: /etc/paceline/server-tls
  readOnly: true
{{- end }}
{{- if .Values.models.hubSecret }}
- name: hub
  mountPath: /etc/paceline/hub
  readOnly: true
{{- end }}
{{- if .Values.data.existingClaim }}
- name: data
  mountPath: /data
{{- end }}
{{- end -}}

{{- define "paceline.volumes" -}}
- name: config
  configMap:
    name: {{ include "paceline.name" . }}
- name: tmp
  emptyDir: {}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.sharedMemory }}
- name: models
{{- if eq .Values.models.storage "pvc" }}
  persistentVolumeClaim:
    claimName: {{ include "paceline.modelsClaim" . }}
{{- else if eq .Values.models.storage "hostPath" }}
  hostPath:
    path: {{ required "models.hostPath: expected a folder of the nodes" .Values.models.hostPath }}
    type: DirectoryOrCreate
{{- else }}
  emptyDir: {}
{{- end }}
{{- if .Values.apiKeys.existingSecret }}
- name: keys
  secret:
    secretName: {{ .Values.apiKeys.existingSecret }}
{{- end }}
{{- with include "paceline.workersSecret" . }}
- name: workers-tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with include "paceline.serverSecret" . }}
- name: server-tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- if .Values.models.hubSecret }}
- name: hub
  secret:
    secretName: {{ .Values.models.hubSecret }}
{{- end }}
{{- if .Values.data.existingClaim }}
- name: data
  persistentVolumeClaim:
    claimName: {{ .Values.data.existingClaim }}
{{- end }}
{{- end -}}

{{/* A probe of Ray's agent in the pod. The path is one of Ray's health endpoints. */}}
{{- define "paceline.probe" -}}
exec:
  command:
    - python
    - -c
    - "import urllib.request as u; u.urlopen('http://localhost:{{ .port }}{{ .path }}', timeout=5)"
timeoutSeconds: 10
{{- end -}}

{{- define "paceline.probes" -}}
{{- $raylet := dict "port" 52365 "path" "/api/local_raylet_healthz" -}}
{{- $ready := .isHead | ternary (dict "port" 8265 "path" "/api/gcs_healthz") $raylet -}}
startupProbe:
  {{- include "paceline.probe" $raylet | nindent 2 }}
  periodSeconds: 5
  failureThreshold: 36
livenessProbe:
  {{- include "paceline.probe" $raylet | nindent 2 }}
  periodSeconds: 10
  failureThreshold: 12
readinessProbe:
  {{- include "paceline.probe" $ready | nindent 2 }}
  periodSeconds: 10
  failureThreshold: 3
{{- end -}}

{{/* The pod of the head or of a worker group: root, isHead, group. */}}
{{- define "paceline.pod" -}}
{{- $root := .root -}}
{{- $group := .group -}}
metadata:
  labels:
    {{- include "paceline.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .isHead | ternary "head" (printf "worker-%s" ($group.name | default "")) }}
  annotations:
    paceline/config-checksum: {{ include "paceline.config" $root | sha256sum }}
    {{- with $root.Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "paceline.serviceAccount" $root }}
  automountServiceAccountToken: {{ and .isHead $root.Values.ray.autoscaling }}
  terminationGracePeriodSeconds: {{ $root.Values.terminationGraceSeconds }}
  securityContext:
    {{- include "paceline.podSecurity" $root | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $group.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .isHead | ternary "ray-head" "ray-worker" }}
      image: {{ include "paceline.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext:
        {{- include "paceline.containerSecurity" $root | nindent 8 }}
      env:
        {{- include "paceline.env" $root | nindent 8 }}
        {{- if $root.Values.ray.redis.address }}
        {{- /* How long a node waits for a head that is started again. Ray's own is 60 s. */}}
        - name: RAY_gcs_rpc_server_reconnect_timeout_s
          value: {{ $root.Values.ray.redis.reconnectSeconds | quote }}
        {{- end }}
        {{- with $group.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if .isHead }}
      ports:
        - {name: gcs, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        - {name: serve, containerPort: 8000}
      {{- else }}
      ports:
        - {name: serve, containerPort: 8000}
        - {name: grpc, containerPort: 8001}
      {{- end }}
      {{- $resources := deepCopy ($group.resources | default dict) }}
      {{- if $group.gpus }}
      {{- range $kind := list "limits" "requests" }}
      {{- $_ := set $resources $kind (merge (dict ($group.gpuResource | default "nvidia.com/gpu") $group.gpus) (get $resources $kind | default dict)) }}
      {{- end }}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      lifecycle:
        preStop:
          exec:
            {{- /* Half of the time is for callers, a quarter for Ray's processes. */}}
            command: [python, -m, deploy.jobs.leave, --seconds, {{ div $root.Values.terminationGraceSeconds 2 | quote }}, --grace, {{ max 1 (div $root.Values.terminationGraceSeconds 4) | quote }}]
      {{- include "paceline.probes" (dict "isHead" .isHead) | nindent 6 }}
      volumeMounts:
        {{- include "paceline.mounts" $root | nindent 8 }}
  volumes:
    {{- include "paceline.volumes" $root | nindent 4 }}
{{- end -}}

{{/* The spec of a Ray cluster. */}}
{{- define "paceline.cluster" -}}
rayVersion: {{ .Values.ray.version | quote }}
enableInTreeAutoscaling: {{ .Values.ray.autoscaling }}
{{- if .Values.ray.token.enabled }}
authOptions:
  mode: token
  {{- with .Values.ray.token.existingSecret }}
  secretName: {{ . }}
  {{- end }}
{{- end }}
{{- if .Values.ray.redis.address }}
gcsFaultToleranceOptions:
  redisAddress: {{ .Values.ray.redis.address | quote }}
  {{- with .Values.ray.redis.namespace }}
  externalStorageNamespace: {{ . }}
  {{- end }}
  {{- with .Values.ray.redis.existingSecret }}
  redisPassword:
    valueFrom:
      secretKeyRef:
        name: {{ . }}
        key: password
  {{- end }}
{{- end }}
headGroupSpec:
  rayStartParams:
    dashboard-host: "0.0.0.0"
    num-cpus: "0"
  template:
    {{- include "paceline.pod" (dict "root" . "isHead" true "group" .Values.head) | nindent 4 }}
workerGroupSpecs:
  {{- range .Values.workers }}
  - groupName: {{ .name }}
    replicas: {{ .replicas }}
    minReplicas: {{ .minReplicas | default .replicas }}
    maxReplicas: {{ .maxReplicas | default .replicas }}
    {{- with .labels }}
    labels: {{- toYaml . | nindent 6 }}
    {{- end }}
    rayStartParams: {}
    template:
      {{- include "paceline.pod" (dict "root" $ "isHead" false "group" .) | nindent 6 }}
  {{- end }}
{{- end -}}
