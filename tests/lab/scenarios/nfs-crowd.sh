# Forty nodes on a range of 62 addresses, their directory on NFS: a pod of each has an address
# lab: guests=2 cpus=2 memory=1024 timeout=900 binaries=rdma-agent,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2154

ip netns add pod
ip link set eth0 up
ip addr add "192.168.10.$LAB_GUEST/24" dev eth0
[ "$LAB_GUEST" = 2 ] || serve_store /srv/store 192.168.10.0/24

# node NAME: starts the agent of one more node. Its share is a mount whose caches no other node uses.
agents=()
node() {
	local root=/nodes/$1
	local etc=$root/etc/rdma-netdev
	mkdir -p "$etc" "$root/run" "$root/share" "$root/state"
	ln -s /proc "$root/proc"
	ln -s /run/netns "$root/run/netns"
	mount_store 4.2 hard,nosharecache 192.168.10.1 /srv/store "$root/share"
	shared_store "$root/share" "{\"stateDir\": \"$root/state\", \"ipam\": {\"cooldown\": \"0s\"}}" >"$etc/policy.json"
	start_agent --node "$1" --host-root "$root" --policy "$etc/policy.json" --socket "$root/run/rdma-netdev/agent.sock"
	agents+=("$agent")
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

mapfile -t nodes < <(seq -f "n%02g-$LAB_GUEST" 20)
for node in "${nodes[@]}"; do
	node "$node"
done
[ "$LAB_GUEST" = 2 ] || on "n01-1" rdmactl addresses init
meet made
asked=()
for node in "${nodes[@]}"; do
	added "$node" "pod-$node" 192.168.50.0/26 >"$LAB_OUT/small.$node" &
	asked+=($!)
done
for process in "${asked[@]}"; do
	wait "$process" || true
done
meet asked
cat /lab/out/*/small.* >/tmp/small
equal "a pod of each of 40 nodes has an address of a /26" "40 40" \
	"$(wc -l </tmp/small) $(cut -d ' ' -f 1 /tmp/small | sort -u | wc -l)"
tell "40 nodes on a /26: the longest ADD took $(longest /tmp/small) ms"
check "within a minute" [ "$(longest /tmp/small)" -le 60000 ]
mapfile -t own < <(cut -s -d ' ' -f 1 "$LAB_OUT"/small.*)
owner_of "/nodes/${nodes[0]}/share" 192.168.50.0/24 "${own[@]}" >"$LAB_OUT/owners"
equal "the directory says that each node owns the address of its pod" "$(printf '%s\n' "${nodes[@]}")" \
	"$(<"$LAB_OUT/owners")"
# The guest that serves it ends last.
meet over

