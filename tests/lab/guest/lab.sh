# shellcheck shell=bash
# What a scenario can call. Sourced by guest/scenario; the scenario itself is bash under
# `set -Eeuo pipefail`. Results go to the runner over the second serial line, one line each.

lab_send() { printf '%s\n' "$*" >"$LAB_LINE"; }

# The first line of a text, so that a result stays one line.
lab_line() { head -n 1 <<<"$*" | tr -d '\r'; }

lab_diag() { while IFS= read -r line; do lab_send "diag $line"; done; }

lab_unexpected() {
	lab_send "not ok ran to its end"
	lab_send "diag $3:$4: exit status $1 of: $(lab_line "$2")"
	tail -n 15 "$LAB_OUT/log" | lab_diag
}

# --- results -------------------------------------------------------------------------------

# pass DESCRIPTION / fail DESCRIPTION [LINE…]: one result.
pass() { lab_send "ok $1"; echo "--- ok: $1"; }
fail() {
	lab_send "not ok $1"
	echo "--- NOT OK: $1"
	shift
	[ $# = 0 ] || printf '%s\n' "$@" | lab_diag
}

# skip DESCRIPTION REASON: not tried, by name and with the reason.
skip() { lab_send "skip $1 # $2"; echo "--- skipped: $1: $2"; }

# check DESCRIPTION COMMAND…: passes if the command succeeds. Its output is kept in the log and
# in $checked, and shown if it fails.
check() {
	local what=$1 rc=0
	shift
	checked=$("$@" 2>&1) || rc=$?
	echo "\$ $*"
	[ -z "$checked" ] || printf '%s\n' "$checked"
	if [ "$rc" = 0 ]; then pass "$what"; else fail "$what" "exit status $rc of: $*" "$checked"; fi
}

# refuses DESCRIPTION PATTERN COMMAND…: passes if the command fails and says PATTERN (an
# extended regular expression).
refuses() {
	local what=$1 pattern=$2 out rc=0
	shift 2
	out=$("$@" 2>&1) || rc=$?
	echo "\$ $*"
	printf '%s\n' "$out"
	if [ "$rc" != 0 ] && grep -Eq -- "$pattern" <<<"$out"; then pass "$what"; else
		fail "$what" "expected a failure that says /$pattern/, got exit status $rc of: $*" "$out"
	fi
}

# equal DESCRIPTION WANTED HAVE: passes if both texts are the same; shows the difference.
equal() {
	if [ "$2" = "$3" ]; then pass "$1"; else
		fail "$1" "$(diff --label wanted --label have -U 2 <(printf '%s\n' "$2") <(printf '%s\n' "$3") || true)"
	fi
}

# contains DESCRIPTION PATTERN TEXT: passes if the text matches the extended regular expression.
contains() {
	if grep -Eq -- "$2" <<<"$3"; then pass "$1"; else fail "$1" "no match of /$2/ in:" "$3"; fi
}

# --- what a person who watches reads -----------------------------------------------------

tell() { lab_send "tell $*"; echo "$*"; }
# step TEXT: a headline, with the seconds since the scenario began.
step() { tell "" && tell "$(printf '[%3d s]' $SECONDS) $*"; }
# show COMMAND…: runs it and prints its output, indented.
show() { "$@" 2>&1 | expand -t 4 | while IFS= read -r line; do lab_send "tell     $line"; done; }

# --- waiting, the other guest, the machine -------------------------------------------------

# nap SECONDS: as sleep, without a process, of which the start takes an emulator its time.
exec {lab_silence}<> <(:)
nap() { read -r -t "$1" -u "$lab_silence" || true; }

# wait_for SECONDS COMMAND…: until it succeeds; fails when the time is over.
wait_for() {
	local end=$((SECONDS + $1))
	shift
	until "$@" >/dev/null 2>&1; do
		[ $SECONDS -lt $end ] || { echo "waited in vain for: $*" >&2; return 1; }
		nap 0.2
	done
}

# meet NAME: waits until all guests of the scenario have come to the same point.
meet() {
	: >"/lab/sync/met.$1.$LAB_GUEST"
	wait_for 400 lab_all_met "$1"
}
lab_all_met() {
	local guest
	for guest in $(seq "$(</lab/guests)"); do
		[ -e "/lab/sync/met.$1.$guest" ] || return 1
	done
}

lab_asked=0
# lab_ask WHOM COMMAND…: asks the runner for what a guest cannot do; $lab_answer names the file that has
# the answer.
lab_ask() {
	lab_answer=/lab/sync/answer.$LAB_GUEST.$BASHPID.$((++lab_asked))
	lab_send "$1 ${lab_answer##*/} ${*:2}"
	wait_for 320 test -e "$lab_answer"
	cat "$lab_answer"
}

# machine COMMAND…: a command of QEMU's monitor for this guest's machine (set_link, device_del,
# device_add, …); prints the answer, fails if QEMU complains.
machine() {
	lab_ask machine "$@"
	# HMP commands that succeed are silent.
	[ ! -s "$lab_answer" ] || [ "$1" = info ]
}

# reset: the machine starts anew, and with it the scenario; was_reset says so then. What a node keeps on its disk
# comes back.
reset() {
	cp -a /var/lib/rdma-netdev "/lab/sync/disk.$LAB_GUEST"
	sync
	lab_send reset
	nap 600
}
was_reset() { [ -e "/lab/sync/disk.$LAB_GUEST" ]; }
! was_reset || cp -a "/lab/sync/disk.$LAB_GUEST/." /var/lib/rdma-netdev/

# --- RDMA ----------------------------------------------------------------------------------

# load_rdma: the modules that user space needs; nothing loads them by itself in a guest.
load_rdma() {
	[ -n "${lab_rdma:-}" ] || modprobe -a rdma_rxe ib_uverbs rdma_ucm ib_umad
	lab_rdma=loaded
}

# make_hca NETDEV [HCA]: puts a soft RoCE HCA on a netdev (default name: rxe and the netdev's
# number), sets the netdev up, and waits until its port is active and the NIC's own address is
# settled.
make_hca() {
	local hca=${2:-rxe${1##*[!0-9]}}
	load_rdma
	ip link set "$1" up
	wait_for 20 grep -q 1 "/sys/class/net/$1/carrier"
	rdma link add "$hca" type rxe netdev "$1"
	active "$1" "$hca"
}

# make_hca_down NETDEV HCA: the same on a netdev that is not set up, as a fresh VF is.
make_hca_down() {
	load_rdma
	ip link set "$1" down
	rdma link add "$2" type rxe netdev "$1"
	wait_for 20 grep -q DOWN "/sys/class/infiniband/$2/ports/1/state"
}

# active NETDEV HCA: waits until the port of an HCA is active, and the NIC's own address settled.
active() {
	wait_for 20 grep -q ACTIVE "/sys/class/infiniband/$2/ports/1/state"
	# The kernel gives the NIC its own address when it hears of the carrier, which can be a
	# second after the port's state shows it (net/core/link_watch.c).
	wait_for 20 grep -q " $1\$" /proc/net/if_inet6
	wait_for 20 settled "$1"
}

# settled NETDEV: no address of it is still being checked for duplicates.
settled() { [ -z "$(ip -6 addr show dev "$1" tentative)" ]; }

# gids HCA: the used entries of its GID table: index, GID, type, netdev.
gids() {
	local port=/sys/class/infiniband/$1/ports/1 path gid
	grep -rsv '^0000:0000:0000:0000:0000:0000:0000:0000$' "$port/gids" | sort -t / -k 9n |
		while IFS=: read -r path gid; do
			path=${path##*/}
			printf '%s %s %s %s\n' "$path" "$gid" "$(<"$port/gid_attrs/types/$path")" \
				"$(cat "$port/gid_attrs/ndevs/$path" 2>/dev/null || echo -)"
		done
}

# gid_index HCA IPV4: the index of an address in the HCA's GID table.
gid_index() {
	local gid
	# shellcheck disable=SC2046,SC2183 # four numbers
	gid=$(printf '0000:0000:0000:0000:0000:ffff:%02x%02x:%02x%02x' $(tr . ' ' <<<"$2"))
	gids "$1" | awk -v gid="$gid" '!found && $2 == gid { print $1; found = 1 } END { exit !found }'
}

# undecided: whether the kernel still searches for a duplicate of some address (RFC 4862, 5.4).
undecided() { [ -n "$(ip -6 addr show tentative)" ]; }

# host_state: all that must be as before when the pods are gone: links, addresses, routes,
# rules, neighbours that someone set, HCAs and their GID tables.
host_state() {
	local hca
	wait_for 10 eval '! undecided' || true
	ip -o link show | sed 's/ qlen [0-9]*//'
	ip -o addr show | sed 's/valid_lft.*//'
	ip route show table all | sort
	ip -6 route show table all | grep -v ' table local ' | sort
	ip rule show
	ip neigh show nud permanent
	rdma link show
	for hca in /sys/class/infiniband/*; do
		[ -e "$hca" ] || continue
		gids "${hca##*/}" | sed "s/^/${hca##*/} gid /"
	done
}

# as_before DESCRIPTION BEFORE [COMMAND]: passes if the state that COMMAND prints (host_state) is
# BEFORE again. The kernel fills GID tables and checks addresses a moment after a change.
as_before() {
	local tell=${3:-host_state}
	lab_same() {
		lab_have=$($2)
		[ "$1" = "$lab_have" ]
	}
	wait_for 30 lab_same "$2" "$tell" || true
	equal "$1" "$2" "$lab_have"
}

# --- InfiniBand ----------------------------------------------------------------------------

# make_fabric [TYPE]: makes every NIC of this guest a cable, with an InfiniBand HCA on it and IP over
# InfiniBand on that: mlx5_0 and ib0 on eth0, and so on, set up and with a carrier. Called before a
# scenario with the header key fabric=infiniband. The TYPE rxe_ib_sm leaves the ports to a subnet
# manager.
make_fabric() {
	local nic
	for nic in /sys/class/net/eth*; do
		make_ib_hca "${nic##*/}" "mlx5_${nic##*/eth}" "$@"
	done
}

# make_ib_hca NETDEV HCA [TYPE]: the same for one NIC. The cable is hidden in the namespace `cable`:
# hardware has no such netdev. Its MTU is what IB's largest of 4096 needs.
make_ib_hca() {
	local ib
	[ -e /run/netns/cable ] || { load_rdma; modprobe ib_ipoib; ip netns add cable; }
	ip link set "$1" netns cable
	ip -n cable link set "$1" mtu 4200 up
	wait_for 20 ip netns exec cable grep -q 1 "/sys/class/net/$1/carrier"
	ip netns exec cable rdma link add "$2" type "${3:-rxe_ib}" netdev "$1"
	partitions "$2" 0xffff 0x8001 0x0002
	wait_for 20 ib_netdev "$2"
	ib=$(ib_netdev "$2")
	ip link set "$ib" up
	[ "${3:-rxe_ib}" = rxe_ib ] || return 0
	carries "$ib"
	wait_for 20 grep -q " $ib\$" /proc/net/if_inet6
}

# carries NETDEV [COMMAND…]: waits for its carrier, as COMMAND (ip netns exec) sees it.
carries() { wait_for 30 "${@:2}" grep -q 1 "/sys/class/net/$1/carrier"; }

# remove_fabric: the NICs as they were. No pod may have one of its HCAs.
remove_fabric() {
	local hca nics
	for hca in /sys/class/infiniband/mlx5_*; do
		rdma link delete "${hca##*/}"
	done
	nics=$(ip netns exec cable ip -o link show | grep -c ': eth')
	ip netns delete cable
	all_back() { [ "$(ip -o link show | grep -c ': eth')" = "$nics" ]; }
	wait_for 20 all_back
}

# partitions HCA KEY…: the port's table of partition keys; without the highest bit the membership is limited.
partitions() { echo "${@:2}" >"/sys/class/infiniband/$1/lab_pkeys"; }

# ib_netdev HCA: the IPoIB netdev of its port, in this namespace; not a child.
ib_netdev() {
	local netdev found=''
	for netdev in "/sys/class/infiniband/$1/device/net/"*; do
		[ ! -e "$netdev" ] || [ "$(<"$netdev/iflink")" != "$(<"$netdev/ifindex")" ] || found=${netdev##*/}
	done
	[ -n "$found" ] && echo "$found"
}

# ib_state: as host_state, without what an IPoIB netdev has anew when its RDMA device returns: its
# index, and the queue pair that its address begins with.
ib_state() {
	host_state | sed -E 's/^[0-9]+: //; s/(link\/infiniband )[0-9a-f:]{11}/\1/; s/ netdev_index [0-9]+//' | sort
}

# --- pods ----------------------------------------------------------------------------------

# start_containerd [DIRECTORY]: with the image of the test pods or of an MPI job imported; it answers when this
# returns. The guest's own is 1.6, which knows nothing of CDI; /lab/containerd (header key cdi-containerd) has one
# that reads CDI files. Its number is in $containerd.
start_containerd() {
	local programs=${1:-/usr/bin} image
	mount -t tmpfs containerd /var/lib/containerd
	mkdir -p /etc/containerd /etc/cni/net.d /opt/cni/bin
	cat >/etc/containerd/config.toml <<-'CONFIG'
		version = 2
		[plugins."io.containerd.grpc.v1.cri"]
		  sandbox_image = "localhost/rdma-tools:1"
		  [plugins."io.containerd.grpc.v1.cri".cni]
		    bin_dir = "/opt/cni/bin"
		    conf_dir = "/etc/cni/net.d"
		  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
		    runtime_type = "io.containerd.runc.v2"
	CONFIG
	# The shim is looked up beside containerd, or on its path.
	PATH=$programs:$PATH "$programs/containerd" --log-level warn >>"$LAB_OUT/containerd.log" 2>&1 &
	containerd=$!
	wait_for 180 test -S /run/containerd/containerd.sock
	for image in /lab/pods.tar /lab/mpi.tar; do
		[ ! -e "$image" ] || "$programs/ctr" --namespace k8s.io image import "$image" >/dev/null
	done
}

# stop_containerd: ends it, and forgets all that it knew; no pod may be there.
stop_containerd() {
	kill "$containerd"
	wait "$containerd" || true
	umount /var/lib/containerd
	rm -rf /run/containerd
}

# install_cni MANIFESTS…: our CNI programs and the node's policy, as the DaemonSet's init
# container installs them, and the pods' networks, as offer_networks does.
install_cni() {
	local directory
	# Mounted, as the DaemonSet has them: links are not trusted.
	for directory in /opt/cni/bin /etc/rdma-netdev; do
		mkdir -p $directory /host$directory
		mountpoint -q /host$directory || mount --bind $directory /host$directory
	done
	rdma-device-plugin install --policy /lab/policy.json --node "$(uname -n)"
	offer_networks "$@"
}

# offer_networks MANIFESTS…: what a pod's networks are: the first is any, and leaves nothing on
# the host when the pod is gone; further ones by the definitions among MANIFESTS.
offer_networks() {
	cp /usr/lib/cni/{ptp,host-local,loopback} /lab/bin/multus-standin /opt/cni/bin/
	cat >/etc/cni/cluster.conflist <<-'CONFIG'
		{"cniVersion": "1.0.0", "name": "cluster", "plugins": [
		  {"type": "ptp", "ipam": {"type": "host-local", "subnet": "10.244.0.0/24"}}]}
	CONFIG
	cat >/etc/cni/net.d/00-multus.conf <<-CONFIG
		{"cniVersion": "1.0.0", "name": "multus", "type": "multus-standin",
		 "clusterNetwork": "/etc/cni/cluster.conflist", "networks": [$(printf '"%s"\n' "$@" | paste -sd,)]}
	CONFIG
}

# start_kubelet: the stand-in on containerd, which must run; `kubelet-standin` then asks it. Its
# number is in $kubelet.
start_kubelet() {
	mkdir -p /var/lib/kubelet/device-plugins
	kubelet-standin serve >>"$LAB_OUT/kubelet.log" 2>&1 &
	kubelet=$!
	wait_for 90 kubelet-standin node
}

in_pod() { kubelet-standin exec "$1" -- "${@:2}"; }
address_of() { in_pod "$1" ip -4 -o addr show dev "$2" | awk '{ print $4 }'; }
# worker NAME NETWORKS LIMITS [OPTION…]: runs a pod with these networks, if any, and resources (rdma/nic: 1, …).
worker() {
	local networks=${2:+"k8s.v1.cni.cncf.io/networks: \"$2\""}
	cat >"/tmp/$1.yaml" <<-POD
		apiVersion: v1
		kind: Pod
		metadata:
		  name: $1
		  annotations: {$networks}
		spec:
		  restartPolicy: Never
		  containers:
		  - name: main
		    image: localhost/rdma-tools:1
		    imagePullPolicy: IfNotPresent
		    command: [sleep, infinity]
		    securityContext: {capabilities: {add: [IPC_LOCK]}}
		    resources: {limits: {$3}}
	POD
	kubelet-standin run-pod "${@:4}" "/tmp/$1.yaml"
}
# networks NAME NUMBER: the network's name so many times, for an annotation.
networks() {
	local list
	# shellcheck disable=SC2046 # words are wanted
	printf -v list "$1,%.0s" $(seq "$2")
	echo "${list%,}"
}
# pod_of_nics NAME NICS GPUS [OPTION…]: runs a pod with so many, each NIC by a network rdma-move.
pod_of_nics() {
	worker "$1" "$(networks rdma-move "$2")" "rdma/nic: $2$([ "$3" = 0 ] || echo ", amd.com/gpu: $3")" "${@:4}"
}
hcas_of() { in_pod "$1" sh -c 'cd /sys/class/infiniband && echo *'; }
# units_of POD RESOURCE
units_of() {
	kubelet-standin pods --json |
		jq -r --arg pod "default/$1" --arg r "$2" '.[] | select(.name == $pod) | .devices.main[$r][]?'
}

# start_daemon CONFIGURATION: the device plugin.
start_daemon() {
	rdma-device-plugin run --config-file "$1" >"$LAB_OUT/rdma-device-plugin.log" 2>&1 &
}

# start_profile NAME: the device plugin with the pools of manifests/chart/values/NAME.yaml.
start_profile() {
	awk '/^[^ #]/ { pools = /^pools:/; next } pools { sub(/^  /, ""); print }' \
		"/lab/manifests/chart/values/$1.yaml" >/tmp/pools.yaml
	start_daemon /tmp/pools.yaml
}

# daemonset POOLS: prints the DaemonSet of manifests/base with this file of pools: what kustomize does with the
# component local-store, as far as it matters to one node. No API is here for the agent.
daemonset() {
	python3 - /lab/manifests/base/rdma-netdev.yaml "$1" /lab/policy.json <<-'OURS'
		import json, sys

		DOCUMENTS, POOLS, POLICY = (open(file).read() for file in sys.argv[1:])
		[config_map, daemonset] = (
		    next(text for text in DOCUMENTS.split("\n---\n") if f"\nkind: {kind}\n" in f"\n{text}")
		    for kind in ("ConfigMap", "DaemonSet"))
		data = config_map.index("\ndata:")
		head, rest = daemonset.split("      - name: rdma-agent\n")
		rest = rest[rest.index("      volumes:\n"):]
		rest = rest[:rest.index("      - name: agent-token\n")]
		print(head + rest)
		print("---\n" + config_map[:data] + "\ndata: " + json.dumps({"pools.json": POOLS, "policy.json": POLICY}))
	OURS
}

# --- CNI -----------------------------------------------------------------------------------

# cni PLUGIN COMMAND CONTAINER NETNS INTERFACE CONFIGURATION: calls a CNI plugin as a runtime
# does; NETNS is a name below /run/netns. The result is on stdout, an error on stderr.
cni() {
	local answer rc=0
	answer=$(CNI_COMMAND=$2 CNI_CONTAINERID=$3 CNI_NETNS=/run/netns/$4 CNI_IFNAME=$5 \
		CNI_PATH=/lab/bin:/usr/lib/cni "$1" <<<"$6") || rc=$?
	if [ $rc = 0 ]; then printf '%s' "${answer:+$answer$'\n'}"; else echo "$1 $2 $3: $answer" >&2; fi
	return $rc
}

# node_policy JSON: what the node's administrator allows. Calls by hand have no kubelet that could say
# what a pod was allocated: `{"allow": {"unallocated": true}}`.
node_policy() {
	mkdir -p /etc/rdma-netdev
	echo "$1" >/etc/rdma-netdev/policy.json
}

# --- a store that nodes share --------------------------------------------------------------

# serve_store DIRECTORY CLIENTS: exports a file system in memory by NFS, versions 3 and 4.
# DIRECTORY is `/` to clients of version 4.
serve_store() {
	modprobe -a sunrpc nfsd
	mkdir -p "$1" /var/lib/nfs/{v4recovery,sm,sm.bak,rpc_pipefs} /run/rpcbind
	mount -t tmpfs -o mode=755 store "$1"
	touch /var/lib/nfs/{etab,rmtab,xtab,state}
	echo "$1 $2(rw,sync,no_root_squash,no_subtree_check,fsid=0,insecure)" >/etc/exports
	mount -t nfsd nfsd /proc/fs/nfsd
	rpcbind
	rpc.statd
	exportfs -ra
	# The usual grace time after a start, in which no lock is given, is a minute and a half.
	rpc.nfsd --grace-time 10 --lease-time 10 4
	rpc.mountd
	wait_for 30 rpcinfo -t localhost nfs 4
}

# mount_store VERSION MODE SERVER EXPORT DIRECTORY: mounts a store that another guest serves; VERSION
# is 3 or 4.2, MODE hard or soft, or either with more options. Version 3 without locks between the
# nodes: the store needs none.
mount_store() {
	local options="vers=$1,proto=tcp,$2,timeo=50"
	case $1 in
	4.2) mount -t nfs4 -o "$options" "$3:/" "$5" ;;
	3) mount -t nfs -o "$options,nolock" "$3:$4" "$5" ;;
	esac
}

# shared_store DIRECTORY [JSON]: the policy of a node with such a store; JSON has further keys.
shared_store() {
	jq -nc --arg directory "$1" --argjson more "${2:-{\}}" \
		'{version: 1, stores: {default: {type: "file", directory: $directory}}} + $more'
}

# start_agent [ARGUMENT…]: the agent of this node, or of another one with ARGUMENTs; it answers when this
# returns. Its number is in $agent.
start_agent() {
	local name socket=/run/rdma-netdev/agent.sock arguments=" $* "
	name=$(sed -nE 's/.* --node ([^ ]+) .*/-\1/p' <<<"$arguments")
	[[ $arguments != *" --socket "* ]] || socket=$(sed -E 's/.* --socket ([^ ]+) .*/\1/' <<<"$arguments")
	mkdir -p "${socket%/*}"
	rm -f "$socket"
	rdma-agent "$@" >>"$LAB_OUT/rdma-agent$name.log" 2>&1 &
	agent=$!
	wait_for 60 test -S "$socket"
}

# owners DIRECTORY SUBNET: the document of a subnet without a network name: a line "PART NODE" for each part.
owners() {
	local subnet=$1/default/${2/\//-} epoch
	epoch=$(find "$subnet" -type f -name '[0-9]*' -printf '%f\n' | sort -n | tail -n 1)
	jq -r '.parts | to_entries[] | "\(.key) \(.value.node)"' "$subnet/$epoch"
}

# owner_of DIRECTORY SUBNET ADDRESS…: whose part each address is in.
owner_of() {
	owners "$1" "$2" | python3 -c 'if True:
		import ipaddress, sys
		parts = [line.split() for line in sys.stdin]
		for text in sys.argv[1:]:
		    address = ipaddress.ip_address(text.split("/")[0])
		    print(*(node for part, node in parts if address in ipaddress.ip_network(part)) or ["nobody"])
	' "${@:3}"
}
