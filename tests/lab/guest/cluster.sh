# shellcheck shell=bash
# A cluster for scenarios that have `kubernetes=yes`: etcd, API server, controllers and scheduler on
# the first guest, on each a kubelet with Multus, as /lab/kubernetes has them. Sourced by such a
# scenario.
#
# Everyone has a token and the rights that Kubernetes gives to its name; the kubelet's own API is
# open, since no other user is on these machines.

export KUBECONFIG=/run/cluster/admin
cluster=/lab/kubernetes
# The first address of --service-cluster-ip-range.
service=10.96.0.1
PATH=$cluster:$PATH

# access FILE TOKEN SERVER: a kubeconfig.
access() {
	cat >"$1" <<-CONFIG
		apiVersion: v1
		kind: Config
		clusters: [{name: lab, cluster: {server: "https://$3", insecure-skip-tls-verify: true}}]
		users: [{name: me, user: {token: $2}}]
		contexts: [{name: lab, context: {cluster: lab, user: me}}]
		current-context: lab
	CONFIG
}

# component NAME ARGUMENT…: one of the cluster's programs in the background, its log among the results.
component() { "$@" >>"$LAB_OUT/$1.log" 2>&1 & }

# lab_listens PORT: whether somebody does, on this machine.
lab_listens() { (: <"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# start_cluster ADDRESS NODE…: ready when it returns, with this machine as a node, ADDRESS its own, and
# access for further NODEs.
start_cluster() {
	local address=$1 node who
	shift
	mkdir -p /run/cluster /var/lib/etcd
	mount -t tmpfs -o mode=755 etcd /var/lib/etcd
	cat >/run/cluster/tokens.csv <<-'TOKENS'
		admin-token,admin,1,system:masters
		kube-controller-manager-token,system:kube-controller-manager,3
		kube-scheduler-token,system:kube-scheduler,4
	TOKENS
	for node in "$(uname -n)" "$@"; do
		echo "$node-token,system:node:$node,$node,system:nodes" >>/run/cluster/tokens.csv
	done
	for who in admin kube-controller-manager kube-scheduler; do
		access "/run/cluster/$who" "$who-token" 127.0.0.1
	done
	component etcd --data-dir=/var/lib/etcd
	# Of the service `kubernetes`, for which no proxy is needed so.
	ip addr add $service/32 dev lo
	start_api_server "$address"
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
		--service-account-private-key-file=$cluster/service-accounts.key \
		--root-ca-file=/run/cluster/apiserver.crt
	component kube-scheduler --kubeconfig=/run/cluster/kube-scheduler --leader-elect=false
	kubectl apply -f $cluster/multus.yaml
	add_node "$address" "$address"
	# Pods are refused until the controllers have made the namespace's account.
	wait_for 100 kubectl get serviceaccount default
}

# start_api_server ADDRESS: answers when it returns. It gives up by itself where time passes too fast for
# it, and is started again then, as a machine's service manager would.
start_api_server() {
	run_api_server "$1"
	wait_for 1200 api_answers "$1"
	cp /run/cluster/apiserver.crt "$LAB_OUT/"
}
api_answers() {
	kill -0 "$(</run/cluster/api-server.pid)" 2>/dev/null || run_api_server "$1"
	# Asked by kubectl all the time it would be ready later.
	lab_listens 443 && kubectl get --raw /readyz
}
run_api_server() {
	component kube-apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 --secure-port=443 \
		--advertise-address="$1" --cert-dir=/run/cluster --service-cluster-ip-range=10.96.0.0/16 \
		--authorization-mode=Node,RBAC --token-auth-file=/run/cluster/tokens.csv --allow-privileged \
		--service-account-issuer=https://kubernetes.default.svc \
		--service-account-key-file=$cluster/service-accounts.key \
		--service-account-signing-key-file=$cluster/service-accounts.key \
		--kubelet-preferred-address-types=InternalIP
	echo $! >/run/cluster/api-server.pid
}

# stop_api_server: until start_api_server.
stop_api_server() {
	kill -9 "$(</run/cluster/api-server.pid)"
	wait_for 20 api_is_gone
}
api_is_gone() { ! lab_listens 443; }

# join_cluster SERVER ADDRESS: this machine is a node of SERVER's cluster when it returns.
join_cluster() {
	mkdir -p /run/cluster
	ip route add $service via "$1"
	access /run/cluster/admin admin-token "$1"
	# The first guest applies Multus once its API server answers.
	wait_for 400 kubectl --namespace kube-system get serviceaccount multus
	add_node "$1" "$2"
}

# add_node SERVER ADDRESS: Multus and the kubelet of this machine; ready when it returns.
add_node() {
	local node
	node=$(uname -n)
	mkdir -p /var/lib/kubelet
	mount -t tmpfs -o mode=755 kubelet /var/lib/kubelet
	access /run/cluster/kubelet "$node-token" "$1"
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
	start_node "$2"
	wait_for 200 kubectl get "node/$node"
	kubectl wait --for=condition=Ready --timeout=200s "node/$node"
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

# install_multus SERVER: its program for the runtime, its daemon (the "thick" Multus) with what a pod's
# account would have, and the network it is put before.
install_multus() {
	local account=/var/run/secrets/kubernetes.io/serviceaccount
	mkdir -p /etc/cni/net.d /opt/cni/bin $account
	cp /usr/lib/cni/{ptp,host-local,loopback} $cluster/multus-shim /opt/cni/bin/
	kubectl --namespace kube-system create token multus --duration=24h >$account/token
	cp /lab/out/1/apiserver.crt $account/ca.crt
	cat >/etc/cni/net.d/10-cluster.conflist <<-CONFIG
		{"cniVersion": "1.0.0", "name": "cluster", "plugins": [
		  {"type": "ptp", "ipam": {"type": "host-local", "subnet": "10.244.${LAB_GUEST:-0}.0/24"}}]}
	CONFIG
	cat >/run/cluster/multus.json <<-'CONFIG'
		{"cniVersion": "1.0.0", "multusConfigFile": "auto", "multusAutoconfigDir": "/etc/cni/net.d",
		 "cniConfigDir": "/etc/cni/net.d", "socketDir": "/run/multus", "logLevel": "verbose", "logToStderr": true}
	CONFIG
	MULTUS_NODE_NAME=$(uname -n) KUBERNETES_SERVICE_HOST=$1 KUBERNETES_SERVICE_PORT=443 \
		component multus-daemon -config /run/cluster/multus.json
	wait_for 200 test -e /etc/cni/net.d/00-multus.conf
}

# allocatable RESOURCE: what the API server says the node has of it; it writes 1000 as 1k.
allocatable() {
	kubectl get node "$(uname -n)" -o json |
		jq -r --arg resource "$1" '.status.allocatable[$resource] // "none" | sub("k$"; "000")'
}
offers() { [ "$(allocatable "$1")" = "$2" ]; }
