# Device nodes by CDI alone: containerd 1.6 passes it over, containerd 2 gives them
# lab: nics=2 memory=1792 timeout=900 images=pods cdi-containerd=yes
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam standins=kubelet-standin,multus-standin
# shellcheck shell=bash disable=SC2016,SC2154

networks=/lab/manifests/examples/networks
cdi=/var/run/cdi shared=rdma/hca_shared_devices_a
make_hca eth0 mlx5_0
make_hca eth1 mlx5_1
cat >/tmp/config.yaml <<-'CONFIG'
	version: 1
	rescanInterval: 20s
	pools:
	- resource: rdma/hca_shared_devices_a
	  mode: shared
	  shares: 8
	  delivery: cdi
	  select: {rdmaDevices: [mlx5_0]}
	- resource: rdma/nic
	  mode: exclusive
	  delivery: cdi
	  select: {rdmaDevices: [mlx5_1]}
CONFIG
amount() { kubelet-standin node --json | jq -r --arg r "$1" '.[$r] | "\(.allocatable) of \(.capacity)"'; }
is_amount() { [ "$(amount "$1")" = "$2" ]; }
nodes_of() { in_pod "$1" sh -c 'cd /dev/infiniband && echo *'; }

# --- a runtime without CDI ---------------------------------------------------------------------

start_containerd
install_cni $networks
start_kubelet
start_daemon /tmp/config.yaml
daemon=$!

step "what a containerd without CDI does with a CDI name: nothing, in silence"
check "both pools are offered" wait_for 90 is_amount $shared "8 of 8"
check "a pod runs with a unit" worker trap rdma-macvlan "$shared: 1"
equal "and has no device node at all" "no such directory" \
	"$(in_pod trap sh -c 'test -d /dev/infiniband && echo some || echo no such directory')"
check "it ends" kubelet-standin delete-pod trap

# --- a runtime with CDI ------------------------------------------------------------------------

step "the node gets containerd 2"
stop_containerd
start_containerd /lab/containerd
contains "it is that" ' v?2\.' "$(/lab/containerd/containerd --version)"
restart_standin() {
	kill "$kubelet"
	wait "$kubelet" || true
	start_kubelet
}
restart_standin
check "both pools are offered to the new kubelet" wait_for 90 is_amount $shared "8 of 8"
check "the exclusive one, too" wait_for 60 is_amount rdma/nic "1 of 1"
check "a pod runs with a unit of the shared pool" worker shared rdma-macvlan "$shared: 1"
check "and one with the exclusive one" worker own rdma-move "rdma/nic: 1"
equal "the first has the nodes of its HCA and no other" "rdma_cm uverbs0" "$(nodes_of shared)"
equal "the second has those of its own" "rdma_cm uverbs1" "$(nodes_of own)"
equal "and can open it" mlx5_1 "$(in_pod own ibv_devinfo -d mlx5_1 | awk '/^hca_id/ { print $2 }')"
refuses "what is not its own it cannot" "Failed to open|No IB device|not found|wasn't found|denied" in_pod own ibv_devinfo -d mlx5_0

step "the CDI file is the only way"
file=$(echo $cdi/*hca*.json)
kill -9 $daemon
# Within the directory: containerd sees no file that is moved into it from another one
# (container-device-interface, pkg/cdi/cache.go: it waits for no IN_MOVED_TO).
mv "$file" "$file.away"
refuses "without the file no container is created" 'unresolvable CDI devices' \
	kubelet-standin restart-container shared main
mv "$file.away" "$file"
check "with it the container starts" kubelet-standin restart-container shared main
equal "with the same nodes" "rdma_cm uverbs0" "$(nodes_of shared)"
start_daemon /tmp/config.yaml
check "the daemon offers what is left" wait_for 90 is_amount $shared "8 of 8"
check "both pods end" kubelet-standin delete-pod shared own
