# What restarts and dies beneath a running pod: container, kubelet, daemon, namespace
# lab: memory=1536 timeout=600 images=pods
# lab: binaries=rdma-device-plugin,rdma-netdev,rdma-ipam,rdmactl standins=kubelet-standin,multus-standin
# shellcheck shell=bash disable=SC2016,SC2154

hca=mlx5_0 netdev=ens2f0 resource=rdma/hca_shared_devices_a pod=rdma-test-pod-1
manifests=/lab/manifests/examples/perftest

ip link set eth0 name $netdev
make_hca $netdev $hca
start_containerd
install_cni $manifests
start_kubelet
start_daemon $manifests/pools.json
daemon=$!
kubelet-standin node --wait $resource=63
before=$(host_state)

# What the pod has: devices by the kubelet's account, nodes, address, and its HCA at work.
pod_state() {
	kubelet-standin pods --json | jq -c 'map([.name, .devices])'
	kubelet-standin exec $pod -- sh -c 'cd /dev/infiniband && ls -ln rdma_cm uverbs*' | awk '{ print $1, $5, $6, $NF }'
	kubelet-standin exec $pod -- ip -4 -o addr show net1 | awk '{ print $4 }'
	kubelet-standin exec $pod -- ibv_devinfo | grep -E 'hca_id|state'
}

kubelet-standin run-pod $manifests/pod-1.yaml
state=$(pod_state)
contains "the pod has an address and an active HCA" 'PORT_ACTIVE' "$state"

check "the container restarts" kubelet-standin restart-container $pod perftest
equal "it has what it had before" "$state" "$(pod_state)"

check "the kubelet restarts" kubelet-standin restart-kubelet
check "it learns of the units again" kubelet-standin node --wait $resource=63
equal "the pod has what it had before the kubelet's restart" "$state" "$(pod_state)"
check "the container restarts after that" kubelet-standin restart-container $pod perftest
equal "it has what it had before both" "$state" "$(pod_state)"

kill -9 $daemon
check "without its daemon the node has nothing to give" kubelet-standin node --wait $resource=0
equal "the pod has what it had, without the daemon" "$state" "$(pod_state)"
refuses "a second pod waits for the daemon" "insufficient $resource" \
	kubelet-standin run-pod $manifests/pod-2.yaml
start_daemon $manifests/pools.json
check "the next daemon offers the same" kubelet-standin node --wait $resource=63
equal "the pod has what it had before the daemon's death" "$state" "$(pod_state)"
check "a second pod runs" kubelet-standin run-pod $manifests/pod-2.yaml
check "a second pod ends" kubelet-standin delete-pod rdma-test-pod-2

# The namespace dies first, as when a node is cleaned up with a heavy hand.
netns=$(awk '$3 == "nsfs" { print $2; exit }' /proc/mounts)
pkill -9 sleep
umount "$netns"
rm "$netns"
# The container's shim may be about to leave; a kubelet tries again, too.
check "a pod whose namespace went first is deleted" wait_for 60 kubelet-standin delete-pod $pod
equal "its lease is free" "[]" "$(rdmactl addresses --json | jq -c .leases)"
as_before "the host is as before" "$before"

# rename FROM TO: as no kernel before 6.3 renames a link that is up.
rename() {
	ip link set "$1" down
	ip link set "$1" name "$2"
	ip link set "$2" up
}

rename $netdev other0
check "an HCA that the selectors choose no more has no units" kubelet-standin node --wait $resource=0
refuses "a pod waits for units" "insufficient $resource" kubelet-standin run-pod $manifests/pod-1.yaml
equal "and has no lease" "[]" "$(rdmactl addresses --json | jq -c .leases)"
rename other0 $netdev
check "with its name back it has" kubelet-standin node --wait $resource=63
check "and the pod runs" kubelet-standin run-pod $manifests/pod-1.yaml
