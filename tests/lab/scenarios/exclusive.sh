# RDMA devices of a pod's own: behind another plugin, in the RDMA plugin's place, and their device files
# lab: nics=3 memory=768 timeout=600 binaries=rdma-netdev,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

make_hca eth1 mlx5_1
make_hca eth2 mlx5_2
wait_for 30 rdma system set netns exclusive
ip addr add 10.61.0.1/24 dev eth1
node_policy '{"log": {"level": "info", "file": "/var/log/rdma-netdev.log"}, "allow": {"unallocated": true}}'
pod() { ip netns add "$1" && ip -n "$1" link set lo up; }
in_pod() { ip netns exec "$1" "${@:2}"; }
hcas() { rdma link show | sed -n 's/^link \([^/]*\).*/\1/p' | paste -sd' '; }
hcas_of() { in_pod "$1" rdma link show | sed -n 's/^link \([^/]*\).*/\1/p' | paste -sd' '; }
node_of() { for n in /sys/class/infiniband_verbs/*/; do [ "$(<"$n/ibdev")" != "$1" ] || basename "$n"; done; }
# Ours under the RDMA plugin's name.
mkdir -p /opt/cni/bin
ln -s "$(command -v rdma-netdev)" /opt/cni/bin/rdma

# --- behind another plugin ---------------------------------------------------------------------

before=$(host_state)
pod a
host_device='{"cniVersion": "1.0.0", "name": "rails", "type": "host-device", "device": "eth1", "ipam": {"type": "static", "addresses": [{"address": "10.61.0.7/24"}]}}'
check "the reference plugin moves the NIC" cni /usr/lib/cni/host-device ADD a a net1 "$host_device"
moved=$checked
chained() {
	jq -c --argjson before "$moved" '. + {cniVersion: "1.0.0", name: "rails", prevResult: $before}' <<<"$1"
}
only=$(chained '{"type": "rdma-netdev", "attach": "rdma-only", "rdmaDevice": "mlx5_1"}')
check "the RDMA device of that NIC follows" cni rdma-netdev ADD a a net1 "$only"
equal "the result is the one before" "$(jq 'del(.dns)' <<<"$moved")" "$(jq . <<<"$checked")"
equal "it has left the host" "mlx5_2" "$(hcas)"
equal "the pod has it and no other" "mlx5_1" "$(hcas_of a)"
contains "the address' GID was waited for and reported" '10.61.0.7 of net1 is GID [0-9]+ of mlx5_1 port 1' "$(</var/log/rdma-netdev.log)"
contains "it is in the list" '"rdma-only"' "$(rdmactl pods --json || true)"
check "CHECK agrees" cni rdma-netdev CHECK a a net1 "$only"
refuses "a second ADD is refused" 'attached to network rails already' cni rdma-netdev ADD a a net1 "$only"
pod b
refuses "another pod cannot have it" 'mlx5_1' \
	cni rdma-netdev ADD b b net1 "$(chained '{"type": "rdma-netdev", "attach": "rdma-only", "rdmaDevice": "mlx5_1"}')"
in_pod a rdma dev set mlx5_1 name mine
check "DEL, though the pod renamed it" cni rdma-netdev DEL a a net1 "$only"
equal "it is on the host under its name" "mlx5_1 mlx5_2" "$(hcas)"
check "DEL once more is no error" cni rdma-netdev DEL a a net1 "$only"
check "the reference plugin returns the NIC" cni /usr/lib/cni/host-device DEL a a net1 "$host_device"
ip netns delete a
ip netns delete b
ip link set eth1 up alias ''
ip addr add 10.61.0.1/24 dev eth1
wait_for 20 settled eth1
as_before "with address and link set up again all is as before" "$before"

# --- in the RDMA plugin's place ----------------------------------------------------------------

pod a
check "a NIC for the drop-in" cni /usr/lib/cni/host-device ADD a a net1 "$host_device"
moved=$checked
drop_in=$(chained '{"type": "rdma", "rdmaDevice": "mlx5_1"}')
check "under the RDMA plugin's name it does what that does" cni /opt/cni/bin/rdma ADD a a net1 "$drop_in"
equal "the device went along" "mlx5_1" "$(hcas_of a)"
ip netns delete a
wait_for 30 eval '[ "$(hcas)" = "mlx5_1 mlx5_2" ]'
check "its namespace is gone before DEL" cni /opt/cni/bin/rdma DEL a a net1 "$drop_in"
equal "no attachment is left" "" "$(find /var/lib/rdma-netdev/attachments -type f)"
wait_for 30 ip link show net1
ip link set net1 down
ip link set net1 name eth1 alias ''
ip link set eth1 up
ip addr add 10.61.0.1/24 dev eth1
wait_for 20 settled eth1

# --- what the policy and the mode say ----------------------------------------------------------

pod a
config() { jq -c '. + {cniVersion: "1.1.0", name: "rails", type: "rdma-netdev"}' <<<"$1"; }
refuses "a child would be without its RDMA device" 'exclusive mode' \
	cni rdma-netdev ADD a a net1 "$(config '{"attach": "macvlan", "master": "eth1"}')"
check "unless none is wanted" cni rdma-netdev ADD a a net1 "$(config '{"attach": "macvlan", "master": "eth1", "rdma": "off"}')"
check "and it goes again" cni rdma-netdev DEL a a net1 "$(config '{"attach": "macvlan", "master": "eth1", "rdma": "off"}')"
check "STATUS: a pod's own RDMA devices can be had" cni rdma-netdev STATUS a a net1 "$(config '{"attach": "move", "rdma": "required"}')"
node_policy '{"allow": {"unallocated": true, "netdevs": [{"rdmaDevices": ["mlx5_2"]}]}}'
refuses "the policy's selectors deny this one" 'netdev eth1 is denied: none of the policy' \
	cni rdma-netdev ADD a a net1 "$(jq -c --arg netns /run/netns/a '. + {prevResult: {cniVersion: "1.1.0", interfaces: [{name: "lo", sandbox: $netns}]}}' \
		<<<"$(config '{"attach": "rdma-only", "rdmaDevice": "mlx5_1"}')")"
node_policy '{}'
refuses "without a kubelet nothing leaves the host by default" 'CNI_ARGS has no K8S_POD_NAMESPACE' \
	cni rdma-netdev ADD a a net1 "$(config '{"attach": "move", "device": "eth2"}')"
node_policy '{"allow": {"unallocated": true}}'

# --- another pod has the device by the time of DEL ----------------------------------------------

by_name() {
	jq -c --arg netns "/run/netns/$1" '. + {prevResult: {cniVersion: "1.1.0", interfaces: [{name: "lo", sandbox: $netns}]}}' \
		<<<"$(config '{"attach": "rdma-only", "rdmaDevice": "mlx5_2"}')"
}
check "a pod has a device alone" cni rdma-netdev ADD a a net1 "$(by_name a)"
ip netns delete a
wait_for 30 eval '[ "$(hcas)" = "mlx5_1 mlx5_2" ]'
pod b
check "the next pod gets it" cni rdma-netdev ADD b b net1 "$(by_name b)"
ip netns exec b sleep 600 &
check "the late DEL of the first" cni rdma-netdev DEL a a net1 "$(by_name a)"
equal "the second keeps it" "mlx5_2" "$(hcas_of b)"
kill $!
check "its DEL returns it" cni rdma-netdev DEL b b net1 "$(by_name b)"
equal "the host has both" "mlx5_1 mlx5_2" "$(hcas)"
ip netns delete b
pod a

# --- the device file that the container was promised -------------------------------------------

[ "$(node_of mlx5_1)" = uverbs0 ] && [ "$(node_of mlx5_2)" = uverbs1 ]
move2=$(config '{"attach": "move", "device": "eth2"}')
check "the second device moves" cni rdma-netdev ADD a a net1 "$move2"
equal "it keeps its device file" "uverbs1" "$(node_of mlx5_2)"
check "and returns" cni rdma-netdev DEL a a net1 "$move2"
equal "with the same" "uverbs1" "$(node_of mlx5_2)"
rdma link delete mlx5_1
wait_for 20 settled eth2
state=$(host_state)
refuses "a move that would change it is refused" 'has /dev/infiniband/uverbs1.*would become uverbs0' cni rdma-netdev ADD a a net1 "$move2"
equal "and changes nothing" "$state" "$(host_state)"
make_hca eth1 mlx5_1
check "once the lower number is in use it moves again" cni rdma-netdev ADD a a net1 "$move2"
ip netns delete a
wait_for 30 eval '[ "$(hcas | tr " " "\n" | sort | paste -sd" ")" = "mlx5_1 mlx5_2" ]'
check "and returns from a namespace that died" cni rdma-netdev DEL a a net1 "$move2"
wait_for 20 settled eth2
wait_for 30 rdma system set netns shared
refuses "STATUS: not in shared mode" 'shared mode' cni rdma-netdev STATUS a a net1 "$(config '{"attach": "move", "rdma": "required"}')"
pod a
refuses "and no ADD" 'shared mode' cni rdma-netdev ADD a a net1 "$(config '{"attach": "move", "device": "eth2", "rdma": "required"}')"
