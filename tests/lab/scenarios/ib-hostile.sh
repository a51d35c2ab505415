# Pods that abuse an InfiniBand NIC or child: nothing of theirs is left on the port, and the host's netdev is as it was
# lab: nics=2 fabric=infiniband memory=640 timeout=400 binaries=rdma-netdev,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

node_policy '{"allow": {"unallocated": true}}'
in_pod() { ip netns exec "$1" "${@:2}"; }
pod() { ip netns add "$1" && ip -n "$1" link set lo up; }
config() {
	jq -cn --argjson keys "$1" '{cniVersion: "1.1.0", name: "ib", type: "rdma-netdev",
		ipam: {type: "rdma-ipam", range: "10.61.0.0/24"}} + $keys'
}
links_of() { ip -n "$1" -o link show | sed -E 's/^[0-9]+: ([^:@]*).*/\1/' | paste -sd' '; }
modprobe dummy numdummies=0
ip link set ib0 mtu 2044
before=$(host_state)

step "a NIC that a pod has"
move=$(config '{"attach": "move", "device": "ib0"}')
pod a
check "it goes into the pod" cni rdma-netdev ADD a a net1 "$move"
# A child, other modes, another address, another name.
ip -n a link add link net1 name mine type ipoib pkey 0x8001
mac=$(in_pod a cat /sys/class/net/net1/address)
ip -n a link set net1 down
ip -n a link set net1 address "${mac%??:??}66:99"
ip -n a link set net1 type ipoib mode connected umcast 1
ip -n a link set net1 mtu 40000
ip -n a link set net1 name ib0
contains "the pod changed the address' GUID" '66:99$' "$(in_pod a cat /sys/class/net/ib0/address)"
# One that looks like the host's NIC.
ip -n a link add net1 address 02:00:00:00:00:01 type dummy
check "DEL" cni rdma-netdev DEL a a net1 "$move"
as_before "the NIC is as it was: address, mode, MTU, name" "$before"
equal "the child in the pod is gone" "lo net1" "$(links_of a)"
ip netns delete a
pod a
check "it goes into a pod again" cni rdma-netdev ADD a a net1 "$move"
ip -n a link add link net1 name mine type ipoib pkey 0x8001
ip netns delete a
wait_for 30 ip link show mine
pass "the kernel gives the host what the pod made on it when its namespace ends"
check "DEL" cni rdma-netdev DEL a a net1 "$move"
as_before "that is gone, and the NIC as it was" "$before"

step "a child that a pod has"
child=$(config '{"attach": "ipoib", "master": "ib0", "pkey": "0x8001"}')
for pod in b c; do
	pod $pod
	check "pod $pod gets a child" cni rdma-netdev ADD $pod $pod net1 "$child"
done
# The kernel takes this request and changes nothing.
ip -n b link set net1 type ipoib pkey 0x8002
contains "a child does not leave its partition" 'ipoib pkey +0x8001' "$(ip -n b -d -o link show net1)"
refuses "nor carry children of other partitions" . ip -n b link add link net1 name other type ipoib pkey 0x8002
ip -n b link set net1 down
ip -n b link set net1 name other
other=$(ip -n c -o link show net1)
check "DEL finds it under its other name" cni rdma-netdev DEL b b net1 "$child"
equal "it is gone from the pod" lo "$(links_of b)"
equal "another pod's child is untouched" "$other" "$(ip -n c -o link show net1)"
check "DEL of the other" cni rdma-netdev DEL c c net1 "$child"
ip netns delete b
ip netns delete c
as_before "the host is as before" "$before"
equal "no lease is left" "[]" "$(rdmactl addresses --json | jq -c .leases)"
equal "no attachment is left" "" "$(find /var/lib/rdma-netdev/attachments -type f)"
