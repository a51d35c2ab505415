# shellcheck shell=bash disable=SC2154
# Several nodes in a guest, whose stores are one directory on NFS, served by the first guest.

ip netns add pod
ip link set eth0 up
ip addr add "192.168.10.$LAB_GUEST/24" dev eth0
[ "$LAB_GUEST" = 2 ] || serve_store /srv/store 192.168.10.0/24

# node NAME: starts the agent of one more node. Its share is a mount whose caches no other node uses.
node() {
	local root=/nodes/$1
	local etc=$root/etc/rdma-netdev
	mkdir -p "$etc" "$root/run" "$root/share" "$root/state"
	ln -s /proc "$root/proc"
	ln -s /run/netns "$root/run/netns"
	mount_store 4.2 hard,nosharecache 192.168.10.1 /srv/store "$root/share"
	shared_store "$root/share" "{\"stateDir\": \"$root/state\", \"ipam\": {\"cooldown\": \"0s\"}}" >"$etc/policy.json"
	start_agent --node "$1" --host-root "$root" --policy "$etc/policy.json" --socket "$root/run/rdma-netdev/agent.sock"
}

# on NODE COMMAND…: as a program of that node.
on() {
	RDMA_NODE_NAME=$1 RDMA_HOST_ROOT=/nodes/$1 RDMA_NETDEV_POLICY=/nodes/$1/etc/rdma-netdev/policy.json "${@:2}"
}

network() {
	echo '{"cniVersion": "1.0.0", "name": "rails", "type": "rdma-netdev", "ipam": {"type": "rdma-ipam",
		"range": "'"$1"'"}}'
}
add() { on "$1" cni rdma-ipam ADD "$2" pod net1 "$(network "$3")" | jq -r '.ips[0].address'; }

# added NODE POD RANGE: as a runtime that tries again; prints the address and the milliseconds.
added() {
	local begun=${EPOCHREALTIME/./} address
	until address=$(add "$@" 2>>"$LAB_OUT/refused.log"); do
		[ $((${EPOCHREALTIME/./} - begun)) -lt 300000000 ] || { echo "$1 $2: none in five minutes" >&2 && return 1; }
		nap 1
	done
	echo "$address $(((${EPOCHREALTIME/./} - begun) / 1000))"
}
longest() { awk '$2 > most { most = $2 } END { print most }' "$@"; }
