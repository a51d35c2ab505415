# Topology Manager on a whole real cluster: processors, GPUs and NICs of one NUMA node, by the hints of each kind of pool
# lab: topology=2x4x1 memory=3072 cpus=6 timeout=3600 images=pods,node kubernetes=yes
# lab: cdi-containerd=yes
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdma-agent,rdmactl standins=gpu-plugin-standin
# shellcheck shell=bash disable=SC2016,SC2154

# shellcheck source=tests/lab/guest/cluster.sh
. /lab/guest/cluster.sh
manifests=/lab/manifests
address=172.20.0.1

# eth0 is the node's own. Each NUMA node has four NICs, four GPUs and three processors; the kubelet keeps
# the first one.
node_address $address
for nic in 1 2 3 4 5 6 7; do make_hca eth$nic mlx5_$nic; done
mount --make-rshared /
start_containerd /lab/containerd
ctr --namespace k8s.io image import /lab/node.tar
kubelet_more='cpuManagerPolicy: static
reservedSystemCPUs: "0"
topologyManagerScope: pod
topologyManagerPolicy: single-numa-node'
join_cluster $address
component gpu-plugin-standin
check "the node offers eight GPUs" wait_for 200 offers amd.com/gpu 8

numa_of_nic() { cat "/sys/class/net/$1/device/../numa_node"; }
equal "NICs are on both NUMA nodes" "0 0 0 0 1 1 1 1" "$(for nic in 0 1 2 3 4 5 6 7; do numa_of_nic eth$nic; done | xargs)"
cat >/tmp/values.yaml <<-'VALUES'
	pools:
	  version: 1
	  topology: {gpuResources: [amd.com/gpu]}
	  pools:
	  - {resource: rdma/shared, mode: shared, shares: 4, select: {ifNames: [eth1, eth4]}}
	  - {resource: rdma/one, mode: exclusive, select: {ifNames: [eth2, eth5]}}
	  - {resource: rdma/late, mode: exclusive, binding: late, bindAtStart: true, select: {ifNames: [eth3, eth6, eth7]}}
VALUES
check "the API server takes the chart" helm install rdma-netdev $manifests/chart --namespace kube-system -f /tmp/values.yaml
check "the DaemonSet is rolled out" own rollout status ds/rdma-netdev --timeout=600s
for offer in "shared 8" "one 2" "late 3"; do
	# shellcheck disable=SC2086
	check "the node offers rdma/${offer% *}" wait_for 200 offers rdma/$offer
done

# pod NAME LIMITS…: one container with a processor of its own.
pod() {
	kubectl apply -f - <<-POD
		apiVersion: v1
		kind: Pod
		metadata: {name: $1}
		spec:
		  automountServiceAccountToken: false
		  restartPolicy: Never
		  terminationGracePeriodSeconds: 1
		  containers:
		  - name: main
		    image: localhost/rdma-tools:1
		    imagePullPolicy: IfNotPresent
		    command: [sleep, infinity]
		    resources: {limits: {cpu: 1, memory: 16Mi, $2}}
	POD
}
runs() { check "$1 runs" kubectl wait --for=condition=Ready --timeout=300s "pod/$1"; }
phase() { kubectl get pod "$1" -o json | jq -r '"\(.status.phase) \(.status.reason)"'; }
is_phase() { [ "$(phase "$1")" = "$2" ]; }
rejected() { check "$1 is rejected by the Topology Manager" wait_for 100 is_phase "$1" "Failed TopologyAffinityError"; }
# places POD: the NUMA nodes of its processor, its HCAs and its GPUs.
places() {
	local cpu node
	cpu=$(in_pod "$1" sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status)
	basename "$(echo "/sys/devices/system/cpu/cpu$cpu"/node*)" | sed 's/node//'
	for node in $(in_pod "$1" sh -c 'ls /dev/infiniband' | grep uverbs); do
		numa_of_nic "eth$(sed 's/.*_//' "/sys/class/infiniband_verbs/$node/ibdev")"
	done
	kubectl rdma pods --json | jq -r --arg pod "default/$1" '.. | objects | select(.pod? == $pod) | .gpus[]?' |
		sed 's/ .*//' | sort -u | while read -r gpu; do cat "/sys/bus/pci/devices/$gpu/numa_node"; done
}
# together POD NODE: all of it is on this NUMA node, or on any one if none is named.
together() {
	local all
	all=$(places "$1" | sort -u | xargs)
	if [ -n "${2:-}" ]; then equal "$1: all of it is on NUMA node $2" "$2" "$all"; else
		contains "$1: all of it is on one NUMA node" '^[01]$' "$all"
	fi
	echo "$1: $(places "$1" | xargs)"
}
ends() { check "they end" kubectl delete pod "$@" --now --timeout=200s; }
ln -s /lab/bin/rdmactl /usr/local/bin/kubectl-rdma

for policy in single-numa-node restricted; do
	if [ $policy = restricted ]; then
		step "the kubelet has the policy restricted"
		kill "$(</run/cluster/kubelet.pid)"
		sed -i "s/^topologyManagerPolicy: .*/topologyManagerPolicy: $policy/" /run/cluster/kubelet.yaml
		start_node $address
		check "the node offers its NICs again" wait_for 200 offers rdma/late 3
		check "and its GPUs" wait_for 200 offers amd.com/gpu 8
		nap 10
	fi

	step "$policy: a shared pool"
	for name in shared-1 shared-2; do pod $name 'rdma/shared: 1'; done
	for name in shared-1 shared-2; do runs $name && together $name; done
	ends shared-1 shared-2

	step "$policy: an exclusive pool"
	for name in one-1 one-2; do pod $name 'rdma/one: 1'; done
	for name in one-1 one-2; do runs $name && together $name; done
	equal "each has an HCA of its own NUMA node" "0 1" "$(for name in one-1 one-2; do places $name | tail -n 1; done | sort | xargs)"
	ends one-1 one-2

	step "$policy: a late pool"
	pod late-2 'rdma/late: 2, amd.com/gpu: 2'
	runs late-2 && together late-2 1
	pod late-1 'rdma/late: 1, amd.com/gpu: 1'
	runs late-1 && together late-1 0
	ends late-1 late-2
	pod late-1 'rdma/late: 1, amd.com/gpu: 1, rdma/one: 1'
	runs late-1 && together late-1
	ends late-1

	step "$policy: what no NUMA node has"
	if [ $policy = single-numa-node ]; then
		pod both 'rdma/one: 2'
		rejected both
		contains "an event says so" '^TopologyAffinityError$' \
			"$(kubectl get events --field-selector involvedObject.name=both -o json | jq -r '.items[].reason')"
		pod both-late 'rdma/late: 3, amd.com/gpu: 3'
		rejected both-late
		ends both both-late
	else
		# One NUMA node does not have so many: two are not worse than what is possible.
		pod both 'rdma/one: 2'
		runs both
		ends both
	fi
done
