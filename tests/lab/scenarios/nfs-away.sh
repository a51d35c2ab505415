# A file server that is away for a minute, on hard mounts: what waits goes on, nothing doubled or lost
# lab: guests=2 memory=768 busy=1 timeout=1500 binaries=rdma-device-plugin,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2154

store=/var/lib/rdma-netdev/leases
network='{"cniVersion": "1.0.0", "name": "rails", "type": "rdma-netdev",
	"ipam": {"type": "rdma-ipam", "range": "192.168.50.0/24", "gateway": "192.168.50.1"}}'
ip netns add pod
ip link set eth0 up
ip addr add "192.168.10.$LAB_GUEST/24" dev eth0
[ "$LAB_GUEST" = 2 ] || serve_store /srv/store 192.168.10.0/24
mkdir -p $store /var/lib/kubelet/device-plugins /etc/rdma

container() { echo "$(uname -n)-$1"; }
add() { cni rdma-ipam ADD "$(container "$1")" pod net1 "$network" | jq -r '.ips[0].address'; }
del() { cni rdma-ipam DEL "$(container "$1")" pod net1 "$network"; }
leases() { rdmactl addresses --json | jq '.leases | length'; }
addresses() { cat "/lab/out/"*/"$1".* | grep .; }

# A runtime that does not wait: it kills the plugin.
killed() {
	CNI_COMMAND=ADD CNI_CONTAINERID=$(container "$1") CNI_NETNS=/run/netns/pod CNI_IFNAME=net1 \
		CNI_PATH=/lab/bin timeout --signal=KILL 20 rdma-ipam <<<"$network" >/dev/null || true
}
alive() { (exec 3<>/dev/tcp/127.0.0.1/9834 && printf 'GET /healthz HTTP/1.0\r\n\r\n' >&3 && grep -q ' 200 ' <&3); }
gone() { [ "$(rdmactl addresses --json --node "$(uname -n)" | jq -r '.leases[].container' | grep -c over)" = 0 ]; }

# away ROUND: ten pods ask while the server is away, two of them are killed.
away() {
	local pod
	asked=()
	for pod in $(seq 11 20); do
		{ add "$pod" || echo "refused"; } >"$LAB_OUT/$1.$pod" 2>>"$LAB_OUT/refused.log" &
		asked+=($!)
	done
	killed 21 &
	asked+=($!)
	killed 22 &
	asked+=($!)
	sleep 25
	check "$1: the daemon lives while the server is away" alive
	check "$1: status ends, too" timeout 60 rdmactl status
	contains "$1: and names the store that does not answer" 'store "default": it is late' "$checked"
	sleep 35
}

# back ROUND: every pod that asked has an address by now, and no two pods have the same.
back() {
	local process
	for process in "${asked[@]}"; do
		wait "$process" || true
	done
	add 21 >"$LAB_OUT/$1.21"
	check "$1: DEL of a pod whose ADD was killed succeeds" del 22
	meet "asked-$1"
	equal "$1: no ADD was refused" "" "$(addresses "$1" | grep refused || true)"
	equal "$1: no address twice" "" "$(addresses "$1" | sort | uniq -d)"
	for pod in 3 12 21; do
		equal "$1: pod $pod that asks again has the address that it got" "$(cat "$LAB_OUT/$1.$pod")" "$(add "$pod")"
	done
	equal "$1: each node sees all leases" "$(addresses "$1" | wc -l)" "$(leases)"
	# The other node does so, too, and makes a file to read the server's clock.
	check "$1: fsck finds nothing wrong" rdmactl addresses fsck --min-age 10s
	meet "seen-$1"
}

finish() {
	local pod
	ip netns del over
	check "$1: the daemon releases what a dead pod left" wait_for 120 gone
	for pod in $(seq 22); do
		del "$pod"
	done
	meet "deleted-$1"
	equal "$1: no lease is left" 0 "$(leases)"
	meet "counted-$1"
}

rdma-device-plugin run --config-file /lab/manifests/examples/perftest/pools.json --metrics-addr 127.0.0.1:9834 \
	--reclaim-interval 15 >"$LAB_OUT/rdma-device-plugin.log" 2>&1 &
check "the daemon runs" wait_for 60 alive

for version in 4.2 3; do
	meet "start-$version"
	mount_store $version hard 192.168.10.1 /srv/store $store
	meet "mounted-$version"

	round=NFS-$version
	for pod in $(seq 10); do
		add "$pod" >"$LAB_OUT/$round.$pod"
	done
	# A pod whose namespace goes without DEL after all this; the daemon must find it.
	ip netns add over
	cni rdma-ipam ADD "$(container over)" over net1 "$network" | jq -r '.ips[0].address' >"$LAB_OUT/$round.over"
	meet "added-$round"
	case $version.$LAB_GUEST in
	# The cable of one node; the server's own node goes on.
	4.2.1)
		asked=()
		for pod in $(seq 11 20); do
			add "$pod" >"$LAB_OUT/$round.$pod"
			sleep 3
		done
		;;
	4.2.2)
		machine set_link nic0 off
		away "$round"
		machine set_link nic0 on
		;;
	# The server, for both.
	3.*)
		[ "$LAB_GUEST" = 2 ] || rpc.nfsd 0
		meet "stopped-$round"
		away "$round"
		[ "$LAB_GUEST" = 2 ] || rpc.nfsd --grace-time 10 --lease-time 10 4
		;;
	esac
	back "$round"
	finish "$round"
	# A round of the daemon may be reading it.
	check "$round: the store is unmounted" wait_for 60 umount $store
	# The guest that serves it ends last.
	meet "unmounted-$version"
done
