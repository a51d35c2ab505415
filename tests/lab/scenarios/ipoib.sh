# Children of IPoIB netdevs on two nodes: modes, partitions, MTU, and those that the kernel gives back
# lab: guests=2 nics=2 fabric=infiniband memory=640 timeout=400 binaries=rdma-netdev,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2016,SC2154

node_policy '{"log": {"level": "info", "file": "/var/log/rdma-netdev.log"}, "allow": {"unallocated": true}}'
other=$((3 - LAB_GUEST))
in_pod() { ip netns exec "$1" "${@:2}"; }
pod() { ip netns add "$1" && ip -n "$1" link set lo up; }
# child MASTER KEYS: a network with an address range of this node's own.
child() {
	jq -cn --arg master "$1" --argjson keys "$2" --arg tens "10.61.0.$LAB_GUEST" '{cniVersion: "1.1.0",
		name: "partition", type: "rdma-netdev", attach: "ipoib", master: $master,
		ipam: {type: "rdma-ipam", range: "10.61.0.0/24", range_start: ($tens + "0"), range_end: ($tens + "9")}} + $keys'
}
address_of() { jq -r '.ips[0].address' <<<"$1" | cut -d/ -f1; }
info_of() { ip -n "$1" -d -o link show net1; }
links() { ip -o link show | sed -E 's/^[0-9]+: ([^:@]*).*/\1/' | sort | paste -sd' '; }
no_child() { [ -z "$(ip -o link show type ipoib | grep '@')" ]; }

before=$(host_state)

step "children in both modes"
for mode in datagram connected; do
	config=$(child ib0 '{"pkey": "0x8001", "mode": "'$mode'", "mtu": 2000}')
	pod a
	check "$mode: a pod gets a child of ib0" cni rdma-netdev ADD a a net1 "$config"
	result=$checked
	contains "$mode: partition, mode, and multicast by applications" "ipoib pkey +0x8001 mode +$mode umcast +0001" "$(info_of a)"
	contains "$mode: it has the network's MTU" 'mtu 2000 ' "$(info_of a)"
	equal "$mode: the result says so" 2000 "$(jq '.interfaces[0].mtu' <<<"$result")"
	pod b
	second=$(child ib1 '{"pkey": "1", "mode": "'$mode'", "mtu": 2000, "umcast": false}')
	check "$mode: another gets one of the other HCA" cni rdma-netdev ADD b b net1 "$second"
	address=$(address_of "$checked")
	contains "$mode: one without that multicast" 'umcast +0000' "$(info_of b)"
	carries net1 in_pod a
	carries net1 in_pod b
	check "$mode: they reach each other" in_pod a ping -c 2 -W 5 "$address"
	echo "$address" >"$LAB_OUT/address.$mode"
	meet "$mode.up"
	check "$mode: a pod of the other node is reached" in_pod a ping -c 2 -W 5 "$(<"/lab/out/$other/address.$mode")"
	check "$mode: CHECK agrees" cni rdma-netdev CHECK a a net1 \
		"$(jq -c --argjson result "$result" '. + {prevResult: $result}' <<<"$config")"
	meet "$mode.reached"
	check "$mode: DEL" cni rdma-netdev DEL a a net1 "$config"
	check "$mode: DEL of the other" cni rdma-netdev DEL b b net1 "$second"
	ip netns delete a
	ip netns delete b
done
as_before "the host is as before" "$before"

step "without the key mtu a child has its netdev's MTU"
usual=$(cat /sys/class/net/ib0/mtu)
ip link set ib0 mtu 1496
for mode in datagram connected; do
	config=$(child ib0 '{"pkey": "0x8001", "mode": "'$mode'"}')
	pod a
	check "$mode: ADD" cni rdma-netdev ADD a a net1 "$config"
	contains "$mode: it has the netdev's MTU" 'mtu 1496 ' "$(info_of a)"
	equal "$mode: the result says so" 1496 "$(jq '.interfaces[0].mtu' <<<"$checked")"
	check "$mode: DEL" cni rdma-netdev DEL a a net1 "$config"
	ip netns delete a
done
ip link set ib0 mtu "$usual"

step "a new child has the address of an earlier one"
static() { jq -c --arg address "10.62.$LAB_GUEST.$1/24" '.cniVersion = "1.0.0" | .ipam = {type: "static", addresses: [{address: $address}]}' <<<"$(child "$2" '{"pkey": "0x8001"}')"; }
pod a
pod b
check "ADD" cni rdma-netdev ADD a a net1 "$(static 5 ib0)"
check "ADD of a peer" cni rdma-netdev ADD b b net1 "$(static 6 ib1)"
check "the peer reaches it" in_pod b ping -c 1 -W 5 "10.62.$LAB_GUEST.5"
first=$(in_pod a cat /sys/class/net/net1/address)
knows() { in_pod b ip neigh show "10.62.$LAB_GUEST.5" | grep -q "lladdr $1"; }
check "the peer knows its queue pair" knows "$first"
check "DEL" cni rdma-netdev DEL a a net1 "$(static 5 ib0)"
check "ADD of another with the address" cni rdma-netdev ADD a a net1 "$(static 5 ib0)"
second=$(in_pod a cat /sys/class/net/net1/address)
check "it has another queue pair" test "$first" != "$second"
# The announcement is a multicast without acknowledgement: one of three has to arrive.
learns() {
	for _ in 1 2 3; do
		if wait_for 5 knows "$second"; then return; fi
		cni rdma-netdev DEL a a net1 "$(static 5 ib0)" && cni rdma-netdev ADD a a net1 "$(static 5 ib0)" || return
		second=$(in_pod a cat /sys/class/net/net1/address)
	done
	return 1
}
check "the peer learns it from the announcement" learns
for name in a b; do
	check "DEL" cni rdma-netdev DEL $name $name net1 "$(static 5 ib0)"
	ip netns delete $name
done
as_before "the host is as before" "$before"

step "partitions"
# Node 1 has a full membership of partition 3, node 2 a limited one; of 4 both have a limited one.
case $LAB_GUEST in
1) partitions mlx5_0 0xffff 0x8003 0x0004 ;;
2) partitions mlx5_0 0xffff 0x0003 0x0004 ;;
esac
meet partitions
for key in 3 4; do
	pod p$key
	check "a child in partition $key" cni rdma-netdev ADD p$key p$key net1 "$(child ib0 '{"pkey": "0x800'$key'"}')"
	address_of "$checked" >"$LAB_OUT/address.$key"
	carries net1 in_pod p$key
done
meet members
check "a full and a limited member reach each other" in_pod p3 ping -c 2 -W 5 "$(</lab/out/$other/address.3)"
refuses "two limited members do not" '100% packet loss' in_pod p4 ping -c 2 -W 2 "$(</lab/out/$other/address.4)"
meet tried
check "GC with nothing valid removes both" cni rdma-netdev GC - - - \
	'{"cniVersion": "1.1.0", "name": "partition", "type": "rdma-netdev", "cni.dev/valid-attachments": []}'
as_before "the host is as before, and the pods have no child" "$before"
equal "the pods have none" "lo lo" "$(for p in p3 p4; do ip -n $p -o link show | sed 's/^[0-9]*: \([^:]*\).*/\1/'; done | paste -sd' ')"
ip netns delete p3
ip netns delete p4
pod a
refuses "a key that the port's table does not have is refused with those that it has" \
	'0x8009.*0xffff \(full\), 0x8003 \(|0x8009.*0xffff \(full\), 0x0003 \(' \
	cni rdma-netdev ADD a a net1 "$(child ib0 '{"pkey": "0x8009"}')"
policy=$(</etc/rdma-netdev/policy.json)
node_policy "$(jq -c '.allow.inactivePartitions = true' <<<"$policy")"
config=$(child ib0 '{"pkey": "0x8009"}')
check "where the policy says so, the pod starts before its partition is active" cni rdma-netdev ADD a a net1 "$config"
result=$checked
warnings() { grep -c 'warn.*net1 has no carrier: pkey 0x8009: the port below ib0' /var/log/rdma-netdev.log; }
equal "ADD warns" 1 "$(warnings)"
check "CHECK agrees" cni rdma-netdev CHECK a a net1 "$(jq -c --argjson result "$result" '. + {prevResult: $result}' <<<"$config")"
equal "and warns again" 2 "$(warnings)"
contains "so does status" 'a when it was attached: net1 has no carrier: pkey 0x8009' "$(rdmactl status 2>/dev/null || true)"
partitions mlx5_0 0xffff 0x8003 0x0004 0x8009
check "it has a carrier once the port is a member" carries net1 in_pod a
check "CHECK agrees again" cni rdma-netdev CHECK a a net1 "$(jq -c --argjson result "$result" '. + {prevResult: $result}' <<<"$config")"
equal "and does not warn" 2 "$(warnings)"
check "DEL" cni rdma-netdev DEL a a net1 "$config"
node_policy "$policy"
refuses "an ipvlan on IPoIB is refused with the remedy" 'ipoib' cni rdma-netdev ADD a a net1 "$(child ib0 '{"attach": "ipvlan"}')"
refuses "so is a macvlan" 'attach to ipoib' cni rdma-netdev ADD a a net1 "$(child ib0 '{"attach": "macvlan"}')"

node_policy "$(jq -c '.pkeys = {storage: "0x8003", mpi: "0x8004"} | .allow.pkeys = ["storage"]' <<<"$policy")"
check "a partition by its name in the policy" cni rdma-netdev ADD a a net1 "$(child ib0 '{"pkey": "storage"}')"
contains "it is that partition" 'ipoib pkey +0x8003' "$(info_of a)"
check "DEL of it" cni rdma-netdev DEL a a net1 "$(child ib0 '{"pkey": "storage"}')"
refuses "a partition that the policy does not list is denied" 'allows only the partitions 0x8003, and not 0x8004' \
	cni rdma-netdev ADD a a net1 "$(child ib0 '{"pkey": "0x8004"}')"
refuses "so is the parent's own" '0xffff' cni rdma-netdev ADD a a net1 "$(child ib0 '{}')"
node_policy "$policy"

step "the pod's namespace is gone before DEL"
partitions mlx5_0 0xffff 0x8001
config=$(child ib0 '{"pkey": "0x8001"}')
# One of the administrator, alike but for its index.
ip link add link ib0 name admin type ipoib pkey 0x8001
with_admin=$(host_state)
check "ADD" cni rdma-netdev ADD a a net1 "$config"
ip netns delete a
check "DEL at once" cni rdma-netdev DEL a a net1 "$config"
as_before "the child is gone, the administrator's is not" "$with_admin"
pod a
check "ADD again" cni rdma-netdev ADD a a net1 "$config"
ip netns delete a
wait_for 30 eval '[ "$(ip -o link show type ipoib | grep -c @)" = 2 ]'
pass "the kernel gives the child to the host"
check "GC takes it from there" cni rdma-netdev GC - - - \
	'{"cniVersion": "1.1.0", "name": "partition", "type": "rdma-netdev", "cni.dev/valid-attachments": []}'
as_before "it is gone, the administrator's is not" "$with_admin"
pod a
check "ADD once more" cni rdma-netdev ADD a a net1 "$config"
in_pod a ip link delete net1
ip netns delete a
check "DEL of a child that its pod deleted" cni rdma-netdev DEL a a net1 "$config"
as_before "the administrator's is still there" "$with_admin"
ip link delete admin
as_before "the host is as before" "$before"

step "OpenSM gives the partitions"
remove_fabric
meet removed
make_ib_hca eth0 mlx5_0 rxe_ib_sm
contains "a port without a subnet manager is not active" 'INIT' "$(</sys/class/infiniband/mlx5_0/ports/1/state)"
meet init
if [ "$LAB_GUEST" = 1 ]; then
	cat >/tmp/partitions.conf <<-'CONFIG'
		Default=0x7fff, ipoib, defmember=full : ALL=full, SELF=full;
		storage=0x0005, ipoib, defmember=full : ALL=full, SELF=full;
	CONFIG
	mkdir -p /var/cache/opensm /var/log
	opensm -P /tmp/partitions.conf -f "$LAB_OUT/opensm.log" >"$LAB_OUT/opensm.out" 2>&1 &
fi
check "the port becomes active" wait_for 90 grep -q ACTIVE /sys/class/infiniband/mlx5_0/ports/1/state
check "and a member of partition 5" wait_for 60 grep -qx 0x8005 /sys/class/infiniband/mlx5_0/ports/1/pkeys/1
carries ib0
pod s
check "a pod gets a child in it" cni rdma-netdev ADD s s net1 "$(child ib0 '{"pkey": "0x8005"}')"
address_of "$checked" >"$LAB_OUT/address.5"
check "which has a carrier" carries net1 in_pod s
meet storage
check "the pod of the other node is reached" in_pod s ping -c 2 -W 5 "$(</lab/out/$other/address.5)"
meet stored
check "DEL" cni rdma-netdev DEL s s net1 "$(child ib0 '{"pkey": "0x8005"}')"
equal "no lease is left" "[]" "$(rdmactl addresses --json | jq -c .leases)"
equal "no attachment is left" "" "$(find /var/lib/rdma-netdev/attachments -type f)"
meet end
