# shellcheck shell=bash
# The nodes of a cluster, for scenarios that have `kubernetes=yes`: on each a kubelet with Multus, as
# /lab/kubernetes has them. The control plane runs beside the guests (control-plane), at $control_plane
# on their wire. Sourced by such a scenario.
#
# The kubelet's own API is open, since no other user is on these machines.

export KUBECONFIG=/lab/cluster/admin
control_plane=172.20.0.254
# The addresses of the services `kubernetes` and `kube-dns`, which the control plane has itself.
service=10.96.0.1
dns=10.96.0.10

# kubectl, for what is installed.
own() { kubectl --namespace kube-system "$@"; }

# in_pod POD COMMAND…
in_pod() { kubectl exec "$1" -- "${@:2}"; }

# address_of POD [INTERFACE]: its IPv4 address, without the prefix length.
address_of() { in_pod "$1" ip -4 -o addr show dev "${2:-net1}" | awk '{ sub("/.*", "", $4); print $4 }'; }

# meet_late POINT: meet, for as long as a cluster takes to be set up.
meet_late() {
	for _ in 1 2 3 4 5 6; do meet "$1" 2>/dev/null && return; done
	meet "$1"
}

# node_address ADDRESS: sets up eth0, the NIC by which the nodes reach each other.
node_address() {
	ip addr add "$1/24" dev eth0
	ip link set eth0 up
	ip route add default dev eth0
}

# component NAME ARGUMENT…: one of the node's programs in the background, its log among the results.
component() { "$@" >>"$LAB_OUT/$1.log" 2>&1 & }

# api_server start|stop: of the control plane; it answers, or is gone, when this returns.
api_server() {
	lab_ask api-server "$1"
	# shellcheck disable=SC2154 # lab_ask names it
	[ ! -s "$lab_answer" ]
}

# join_cluster ADDRESS: this machine, with ADDRESS as its own, is a ready node when it returns.
join_cluster() {
	local node
	node=$(uname -n)
	# A program of the share would be read anew by each process.
	mkdir -p /usr/local/bin
	cp /lab/kubernetes/* /usr/local/bin/
	ip route add $service via $control_plane
	wait_for 600 test -e /lab/cluster/ready
	mkdir -p /run/cluster /var/lib/kubelet
	mount -t tmpfs -o mode=755 kubelet /var/lib/kubelet
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
	[ ! -e /lab/dns ] || use_dns
	install_multus
	start_node "$1"
	wait_for 200 kubectl get "node/$node"
	kubectl wait --for=condition=Ready --timeout=200s "node/$node"
}

# use_dns: pods have the cluster's DNS (`dns=yes`), and reach it and each other on all nodes.
use_dns() {
	local node
	ip route add $dns via $control_plane
	for node in $(seq "$(</lab/guests)"); do
		[ "$node" = "$LAB_GUEST" ] || ip route add "10.244.$node.0/24" via "172.20.0.$node"
	done
	printf '%s\n' "clusterDNS: [$dns]" 'clusterDomain: cluster.local' >>/run/cluster/kubelet.yaml
	default_route=', "routes": [{"dst": "0.0.0.0/0"}]'
}

# start_node ADDRESS: the kubelet, as a machine's service manager starts it.
start_node() {
	component kubelet --config=/run/cluster/kubelet.yaml --kubeconfig="/lab/cluster/$(uname -n)" --node-ip="$1" --v=2
	echo $! >/run/cluster/kubelet.pid
}

# restart_kubelet ADDRESS: killed, and started again.
restart_kubelet() {
	kill -9 "$(</run/cluster/kubelet.pid)"
	start_node "$1"
}

# install_multus: its program for the runtime, its daemon (the "thick" Multus) with what a pod's
# account would have, and the network it is put before.
install_multus() {
	local account=/var/run/secrets/kubernetes.io/serviceaccount
	mkdir -p /etc/cni/net.d /opt/cni/bin $account
	cp /usr/lib/cni/{ptp,host-local,loopback} /lab/kubernetes/multus-shim /opt/cni/bin/
	cp /lab/cluster/multus-token $account/token
	cp /lab/cluster/ca.crt $account/
	cat >/etc/cni/net.d/10-cluster.conflist <<-CONFIG
		{"cniVersion": "1.0.0", "name": "cluster", "plugins": [
		  {"type": "ptp", "ipam": {"type": "host-local", "subnet": "10.244.${LAB_GUEST:-0}.0/24"${default_route:-}}}]}
	CONFIG
	cat >/run/cluster/multus.json <<-'CONFIG'
		{"cniVersion": "1.0.0", "multusConfigFile": "auto", "multusAutoconfigDir": "/etc/cni/net.d",
		 "cniConfigDir": "/etc/cni/net.d", "socketDir": "/run/multus", "logLevel": "verbose", "logToStderr": true}
	CONFIG
	MULTUS_NODE_NAME=$(uname -n) KUBERNETES_SERVICE_HOST=$service KUBERNETES_SERVICE_PORT=443 \
		component multus-daemon -config /run/cluster/multus.json
	wait_for 200 test -e /etc/cni/net.d/00-multus.conf
}

# allocatable RESOURCE: what the API server says the node has of it; it writes 1000 as 1k.
allocatable() {
	kubectl get node "$(uname -n)" -o json |
		jq -r --arg resource "$1" '.status.allocatable[$resource] // "none" | sub("k$"; "000")'
}
offers() { [ "$(allocatable "$1")" = "$2" ]; }
