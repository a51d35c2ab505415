# shellcheck shell=bash
# A cluster of one node for scenarios that have `kubernetes=yes`: etcd, API server, controllers,
# scheduler and kubelet, with Multus, as /lab/kubernetes has them. Sourced by such a scenario.
#
# Everyone has a token and the rights that Kubernetes gives to its name; the kubelet's own API is
# open, since no other user is on this machine.

export KUBECONFIG=/run/cluster/admin
cluster=/lab/kubernetes
PATH=$cluster:$PATH

# access FILE TOKEN: a kubeconfig.
access() {
	cat >"$1" <<-CONFIG
		apiVersion: v1
		kind: Config
		clusters: [{name: lab, cluster: {server: "https://127.0.0.1:6443", insecure-skip-tls-verify: true}}]
		users: [{name: me, user: {token: $2}}]
		contexts: [{name: lab, context: {cluster: lab, user: me}}]
		current-context: lab
	CONFIG
}

# component NAME ARGUMENT…: one of the cluster's programs in the background, its log among the results.
component() { "$@" >>"$LAB_OUT/$1.log" 2>&1 & }

# lab_listens PORT: whether somebody does, on this machine.
lab_listens() { (: <"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# start_cluster ADDRESS: ready when it returns, with this machine as its node and ADDRESS its own.
start_cluster() {
	local node who
	node=$(uname -n)
	mkdir -p /run/cluster /var/lib/etcd /var/lib/kubelet
	for state in etcd kubelet; do mount -t tmpfs -o mode=755 $state /var/lib/$state; done
	cat >/run/cluster/tokens.csv <<-TOKENS
		admin-token,admin,1,system:masters
		kubelet-token,system:node:$node,2,system:nodes
		kube-controller-manager-token,system:kube-controller-manager,3
		kube-scheduler-token,system:kube-scheduler,4
	TOKENS
	for who in admin kubelet kube-controller-manager kube-scheduler; do
		access "/run/cluster/$who" "$who-token"
	done
	component etcd --data-dir=/var/lib/etcd
	component kube-apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 \
		--advertise-address="$1" --cert-dir=/run/cluster --service-cluster-ip-range=10.96.0.0/16 \
		--authorization-mode=Node,RBAC --token-auth-file=/run/cluster/tokens.csv --allow-privileged \
		--service-account-issuer=https://kubernetes.default.svc \
		--service-account-key-file=$cluster/service-accounts.key \
		--service-account-signing-key-file=$cluster/service-accounts.key \
		--kubelet-preferred-address-types=InternalIP
	# Asked by kubectl all the time it would be ready later.
	wait_for 400 lab_listens 6443
	wait_for 400 kubectl get --raw /readyz
	component kube-controller-manager --kubeconfig=/run/cluster/kube-controller-manager --leader-elect=false \
		--use-service-account-credentials --controllers="$(paste -sd, <<-'NEEDED'
			daemonset-controller
			statefulset-controller
			serviceaccount-controller
			root-ca-certificate-publisher-controller
			garbage-collector-controller
			node-lifecycle-controller
		NEEDED
		)" \
		--service-account-private-key-file=$cluster/service-accounts.key
	component kube-scheduler --kubeconfig=/run/cluster/kube-scheduler --leader-elect=false
	# Nothing is evicted from a disk that is memory; short periods, because time passes slowly here.
	cat >/run/cluster/kubelet.yaml <<-'CONFIG'
		apiVersion: kubelet.config.k8s.io/v1beta1
		kind: KubeletConfiguration
		containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
		cgroupDriver: cgroupfs
		authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
		authorization: {mode: AlwaysAllow}
		failSwapOn: false
		resolvConf: ""
		makeIPTablesUtilChains: false
		syncFrequency: 5s
		localStorageCapacityIsolation: false
		imageGCHighThresholdPercent: 100
		evictionHard: {memory.available: "0%", nodefs.available: "0%", imagefs.available: "0%", nodefs.inodesFree: "0%"}
	CONFIG
	install_multus "$1"
	start_node "$1"
	wait_for 200 kubectl get "node/$node"
	kubectl wait --for=condition=Ready --timeout=200s "node/$node"
	# Pods are refused until the controllers have made the namespace's account.
	wait_for 100 kubectl get serviceaccount default
}

# start_node ADDRESS: the kubelet, as a machine's service manager starts it.
start_node() {
	component kubelet --config=/run/cluster/kubelet.yaml --kubeconfig=/run/cluster/kubelet --node-ip="$1" --v=2
	echo $! >/run/cluster/kubelet.pid
}

# restart_kubelet ADDRESS: killed, and started again.
restart_kubelet() {
	kill -9 "$(</run/cluster/kubelet.pid)"
	start_node "$1"
}

# install_multus ADDRESS: its program for the runtime, its resource and rights, its daemon (the
# "thick" Multus) with what a pod's account would have, and the network it is put before.
install_multus() {
	local account=/var/run/secrets/kubernetes.io/serviceaccount
	mkdir -p /etc/cni/net.d /opt/cni/bin $account
	cp /usr/lib/cni/{ptp,host-local,loopback} $cluster/multus-shim /opt/cni/bin/
	kubectl apply -f $cluster/multus.yaml
	kubectl --namespace kube-system create token multus --duration=24h >$account/token
	cp /run/cluster/apiserver.crt $account/ca.crt
	cat >/etc/cni/net.d/10-cluster.conflist <<-'CONFIG'
		{"cniVersion": "1.0.0", "name": "cluster", "plugins": [
		  {"type": "ptp", "ipam": {"type": "host-local", "subnet": "10.244.0.0/24"}}]}
	CONFIG
	cat >/run/cluster/multus.json <<-'CONFIG'
		{"cniVersion": "1.0.0", "multusConfigFile": "auto", "multusAutoconfigDir": "/etc/cni/net.d",
		 "cniConfigDir": "/etc/cni/net.d", "socketDir": "/run/multus", "logLevel": "verbose", "logToStderr": true}
	CONFIG
	MULTUS_NODE_NAME=$(uname -n) KUBERNETES_SERVICE_HOST=$1 KUBERNETES_SERVICE_PORT=6443 \
		component multus-daemon -config /run/cluster/multus.json
	wait_for 200 test -e /etc/cni/net.d/00-multus.conf
}

# allocatable RESOURCE: what the API server says the node has of it; it writes 1000 as 1k.
allocatable() {
	kubectl get node "$(uname -n)" -o json |
		jq -r --arg resource "$1" '.status.allocatable[$resource] // "none" | sub("k$"; "000")'
}
offers() { [ "$(allocatable "$1")" = "$2" ]; }
