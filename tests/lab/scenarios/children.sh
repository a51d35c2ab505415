# Children of a RoCE NIC: ipvlan in all modes, alone and chained, beside the refusals
# lab: nics=2 memory=768 timeout=400 binaries=rdma-netdev,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

make_hca eth1 mlx5_1
ip addr add 10.61.0.1/24 dev eth1
pod() { ip netns add "$1" && ip -n "$1" link set lo up; }
in_pod() { ip netns exec "$1" "${@:2}"; }
ipam='{"type": "rdma-ipam", "range": "10.61.0.0/24", "range_start": "10.61.0.10"}'
child() { jq -cn --argjson keys "$1" --argjson ipam "$ipam" \
	'{cniVersion: "1.1.0", name: "rails", type: "rdma-netdev", master: "eth1", ipam: $ipam} + $keys'; }

before=$(host_state)
for mode in l2 l3 l3s; do
	config=$(child '{"attach": "ipvlan", "mode": "'$mode'"}')
	pod a
	pod b
	check "ipvlan $mode: the first pod" cni rdma-netdev ADD a a net1 "$config"
	a=$(jq -r '.ips[0].address' <<<"$checked" | cut -d/ -f1)
	result=$checked
	check "ipvlan $mode: the second pod" cni rdma-netdev ADD b b net1 "$config"
	b=$(jq -r '.ips[0].address' <<<"$checked" | cut -d/ -f1)
	contains "ipvlan $mode: the kernel has that mode" "ipvlan .*mode $mode " "$(ip -n a -d link show net1)"
	equal "ipvlan $mode: it has its master's address" "$(</sys/class/net/eth1/address)" "$(jq -r '.interfaces[0].mac' <<<"$result")"
	check "ipvlan $mode: the pods reach each other" in_pod a ping -c 2 -W 5 "$b"
	check "ipvlan $mode: the address is a GID of the port" wait_for 30 gid_index mlx5_1 "$a"
	check "ipvlan $mode: CHECK agrees" cni rdma-netdev CHECK a a net1 "$(jq -c --argjson result "$result" '. + {prevResult: $result}' <<<"$config")"
	if [ $mode = l2 ]; then
		pod c
		leases=$(rdmactl addresses --json | jq -c .leases)
		refuses "a macvlan beside it is refused" 'carries ipvlan children' cni rdma-netdev ADD c c net1 "$(child '{"attach": "macvlan"}')"
		equal "before an address was taken" "$leases" "$(rdmactl addresses --json | jq -c .leases)"
		ip netns delete c
	fi
	check "ipvlan $mode: the first pod ends" cni rdma-netdev DEL a a net1 "$config"
	ip netns delete b
	check "ipvlan $mode: the second, its namespace gone" cni rdma-netdev DEL b b net1 "$config"
	ip netns delete a
done
wait_for 20 settled eth1
as_before "the host is as it was" "$before"
equal "no lease is left" "[]" "$(rdmactl addresses --json | jq -c .leases)"

# Chained, as the reference plugin is: on the chain's interface, with the chain's addresses.
pod a
chained='{"cniVersion": "1.0.0", "name": "rails", "type": "rdma-netdev", "attach": "ipvlan",
	"prevResult": {"cniVersion": "1.0.0", "interfaces": [{"name": "eth1"}],
	"ips": [{"address": "10.61.0.77/24", "gateway": "10.61.0.1", "interface": 0}], "routes": [{"dst": "10.99.0.0/16"}]}}'
check "ipvlan behind a plugin that gave addresses" cni rdma-netdev ADD a a net1 "$chained"
equal "the address is the child's" '1 10.61.0.77/24' "$(jq -r '.ips[0] | "\(.interface) \(.address)"' <<<"$checked")"
contains "it is set" 'inet 10.61.0.77/24' "$(ip -n a -o addr show dev net1)"
contains "with the route" '10.99.0.0/16 via 10.61.0.1 dev net1' "$(ip -n a route)"
check "and goes again" cni rdma-netdev DEL a a net1 "$chained"
refuses "which of two interfaces is meant must be said" 'several interfaces: eth0, eth1' \
	cni rdma-netdev ADD a a net1 "$(jq -c '.prevResult.interfaces = [{name: "eth0"}, {name: "eth1"}]' <<<"$chained")"
refuses "an Ethernet NIC has no IPoIB children" 'not an IP over InfiniBand' cni rdma-netdev ADD a a net1 "$(child '{"attach": "ipoib"}')"
