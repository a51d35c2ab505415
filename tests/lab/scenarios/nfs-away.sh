# A file server that is away for a minute, on hard mounts: pods come and go in what a node has, the rest waits
# lab: guests=2 memory=768 busy=1 timeout=1500 binaries=rdma-agent,rdma-device-plugin,rdma-ipam,rdmactl
# shellcheck shell=bash disable=SC2154

store=/mnt/addresses
subnet=192.168.50.0/24
network='{"cniVersion": "1.0.0", "name": "rails", "type": "rdma-netdev",
	"ipam": {"type": "rdma-ipam", "range": "192.168.50.0/24", "gateway": "192.168.50.1"}}'
node_policy "$(shared_store $store '{"ipam": {"cooldown": "2s"}}')"
ip netns add pod
ip link set eth0 up
ip addr add "192.168.10.$LAB_GUEST/24" dev eth0
[ "$LAB_GUEST" = 2 ] || serve_store /srv/store 192.168.10.0/24
mkdir -p $store /var/lib/kubelet/device-plugins /etc/rdma

container() { echo "$(uname -n)-$1"; }
add() { cni rdma-ipam ADD "$(container "$1")" pod net1 "$network" | jq -r '.ips[0].address'; }
del() { cni rdma-ipam DEL "$(container "$1")" pod net1 "$network"; }
# added POD ROUND: as a runtime that tries again; the address is noted.
added() {
	wait_for 60 add "$1"
	add "$1" >"$LAB_OUT/$2.$1"
}
leases() { rdmactl addresses --json | jq '.leases | length'; }
addresses() { cat /lab/out/*/"$1".*; }
own_addresses() { cat "$LAB_OUT/$1".*; }

# A runtime that does not wait: it kills the plugin.
killed() {
	CNI_COMMAND=ADD CNI_CONTAINERID=$(container "$1") CNI_NETNS=/run/netns/pod CNI_IFNAME=net1 \
		CNI_PATH=/lab/bin timeout --signal=KILL 2 rdma-ipam <<<"$network" >/dev/null || true
}
page() { exec 3<>"/dev/tcp/127.0.0.1/$1" && printf 'GET %s HTTP/1.0\r\n\r\n' "$2" >&3 && cat <&3; }
is_ok() { (page "$1" "$2") | grep -q ' 200 '; }
names_hang() { (page 9836 /readyz) | grep 'has not answered for .* its file server hangs'; }
gone() { [ "$(rdmactl addresses --json | jq -r '.leases[].container' | grep -c over)" = 0 ]; }

# away ROUND: pods come and go while the server is away.
away() {
	local pod begun
	check "$1: the agent says that the file server hangs" wait_for 60 names_hang
	for pod in $(seq 11 40); do
		begun=$SECONDS
		add "$pod" >"$LAB_OUT/$1.$pod" 2>"$LAB_OUT/refused" || break
		took=$((SECONDS - begun))
		[ "$took" -lt 4 ] || fail "$1: pod $pod has an address at once" "it took $took s"
	done
	first_refused=$pod
	rm "$LAB_OUT/$1.$pod"
	check "$1: pods have addresses of what the node has" [ "$pod" -gt 11 ]
	contains "$1: one that needs more is refused, with the reason" 'got no more: .* its file server hangs' \
		"$(<"$LAB_OUT/refused")"
	check "$1: within its limit" [ $((SECONDS - begun)) -lt 15 ]
	killed 41
	check "$1: DEL of a pod whose ADD was killed" del 41
	# Nothing that is noted: it was the first.
	check "$1: DEL of a pod" del 1
	rm "$LAB_OUT/$1.1"
	ip netns del over
	check "$1: the daemon releases what a dead pod left" wait_for 120 gone
	rm "$LAB_OUT/$1.over"
	check "$1: the daemon lives" is_ok 9834 /healthz
	check "$1: status ends" timeout 60 rdmactl status
	kill "$agent"
	if wait_for 30 eval '! kill -0 "$agent"'; then
		pass "$1: the agent ends though the server hangs"
	else
		fail "$1: the agent ends though the server hangs"
	fi
	start_agent --metrics-addr 127.0.0.1:9836
	check "$1: DEL of another pod" del 2
	rm "$LAB_OUT/$1.2"
}

# back ROUND: the pods that were refused have an address, and no two pods have the same.
back() {
	local pod
	check "$1: the pod that was refused gets an address" added "${first_refused:-11}" "$1"
	for pod in $(seq 42 45); do
		added "$pod" "$1"
	done
	check "$1: the agent is ready" wait_for 60 is_ok 9836 /readyz
	meet "asked-$1"
	equal "$1: no address twice" "" "$(addresses "$1" | sort | uniq -d)"
	for pod in 3 42; do
		equal "$1: pod $pod that asks again has the address that it got" "$(cat "$LAB_OUT/$1.$pod")" "$(add "$pod")"
	done
	equal "$1: the node sees its leases" "$(own_addresses "$1" | wc -l)" "$(leases)"
	mapfile -t own < <(own_addresses "$1")
	equal "$1: the directory says that this node owns their addresses" "$(uname -n)" \
		"$(owner_of $store $subnet "${own[@]}" | sort -u)"
	check "$1: fsck finds nothing wrong" rdmactl addresses fsck
	meet "seen-$1"
}

rdma-device-plugin run --config-file /lab/manifests/examples/perftest/pools.json --metrics-addr 127.0.0.1:9834 \
	--reclaim-interval 15 >"$LAB_OUT/rdma-device-plugin.log" 2>&1 &
check "the daemon runs" wait_for 60 is_ok 9834 /healthz
start_agent --metrics-addr 127.0.0.1:9836

for version in 4.2 3; do
	meet "start-$version"
	mount_store $version hard 192.168.10.1 /srv/store $store
	[ "$LAB_GUEST" = 2 ] || rdmactl addresses init
	meet "mounted-$version"

	round=NFS-$version first_refused=''
	for pod in $(seq 10); do
		added "$pod" "$round"
	done
	# A pod whose namespace goes without DEL after all this; the daemon must find it.
	ip netns add over
	over() { cni rdma-ipam ADD "$(container over)" over net1 "$network" | jq -r '.ips[0].address'; }
	wait_for 60 over
	over >"$LAB_OUT/$round.over"
	meet "added-$round"
	case $version.$LAB_GUEST in
	# The cable of one node; the server's own node goes on.
	4.2.1)
		for pod in $(seq 11 30); do
			added "$pod" "$round"
		done
		pass "$round: the other node's pods have addresses meanwhile"
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
		meet "away-$round"
		[ "$LAB_GUEST" = 2 ] || rpc.nfsd --grace-time 10 --lease-time 10 4
		;;
	esac
	back "$round"
	for pod in over $(seq 45); do
		del "$pod"
	done
	ip netns del over 2>/dev/null || true
	equal "$round: no lease is left" 0 "$(leases)"
	check "$round: the node gives its parts back" wait_for 60 rdmactl addresses give-back
	meet "given-$round"
	equal "$round: nobody owns an address" "" "$(owners $store $subnet)"
	meet "counted-$round"
	# The agent may be reading it.
	check "$round: the store is unmounted" wait_for 60 umount $store
	# The guest that serves it ends last.
	meet "unmounted-$version"
done
