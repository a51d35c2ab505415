# The lab itself: soft RoCE behaves as hardware, in pods on a shared HCA and moved with its NIC
# lab: nics=2 memory=768
# shellcheck shell=bash

make_hca eth0
make_hca eth1
ip addr add 192.168.10.1/24 dev eth0

check "an HCA hangs below its NIC's PCI function" test -e /sys/class/infiniband/rxe0/device/vendor
equal "its nodes are there" "rdma_cm uverbs0 uverbs1" "$(cd /dev/infiniband && echo rdma_cm uverbs*)"
before=$(host_state)

# Two namespaces, as pods: macvlans on the NIC, the HCA shared.
for pod in 1 2; do
	ip netns add pod$pod
	ip link add mv$pod link eth0 type macvlan mode bridge
	ip link set mv$pod netns pod$pod
	ip -n pod$pod link set mv$pod name net1
	ip -n pod$pod addr add 192.168.10.1$pod/24 dev net1
	ip -n pod$pod link set net1 up
	ip -n pod$pod link set lo up
done

# write_bw SERVER CLIENT SERVER-ADDRESS SERVER-HCA CLIENT-ADDRESS CLIENT-HCA: ib_write_bw
# between two namespaces, by the GIDs of their addresses.
write_bw() {
	local server_gid client_gid
	server_gid=$(ip netns exec "$1" bash -c ". /lab/guest/lab.sh; gid_index $4 $3")
	client_gid=$(ip netns exec "$2" bash -c ". /lab/guest/lab.sh; gid_index $6 $5")
	ip netns exec "$1" timeout 60 ib_write_bw -u 18 -d "$4" -x "$server_gid" -n 500 &
	wait_for 20 ip netns exec "$1" bash -c 'ss -tln | grep -q :18515'
	ip netns exec "$2" timeout 60 ib_write_bw -u 18 -d "$6" -x "$client_gid" -n 500 "$3"
	wait
}

wait_for 30 gid_index rxe0 192.168.10.12
check "pods of one HCA reach each other" ip netns exec pod1 ping -c 2 -W 5 192.168.10.12
check "pods of one HCA write to each other's memory" \
	write_bw pod2 pod1 192.168.10.12 rxe0 192.168.10.11 rxe0
ip netns delete pod1
ip netns delete pod2
wait_for 30 eval '! gid_index rxe0 192.168.10.12'
as_before "the host is as before" "$before"

# Exclusive mode: a NIC and its HCA go into a namespace together, and come back when it ends.
rdma system set netns exclusive
for pod in 3 4; do
	ip netns add pod$pod
	nic=eth$((pod - 3)) hca=rxe$((pod - 3))
	ip link set $nic netns pod$pod
	rdma dev set $hca netns pod$pod
	ip -n pod$pod addr add 192.168.20.1$pod/24 dev $nic
	ip -n pod$pod link set $nic up
	ip -n pod$pod link set lo up
done
equal "moved HCAs are gone from the host" "" "$(rdma link show)"
wait_for 30 ip netns exec pod4 bash -c '. /lab/guest/lab.sh; gid_index rxe1 192.168.20.14'
check "moved HCAs write to each other's memory" \
	write_bw pod4 pod3 192.168.20.14 rxe1 192.168.20.13 rxe0
ip netns delete pod3
ip netns delete pod4
wait_for 30 test -e /sys/class/infiniband/rxe1
wait_for 30 test -e /sys/class/net/eth0
pass "NICs and HCAs come back from namespaces that end"

ip link set eth1 up
wait_for 30 grep -q ACTIVE /sys/class/infiniband/rxe1/ports/1/state
check "QEMU takes a cable out" machine set_link nic1 off
wait_for 30 grep -q DOWN /sys/class/infiniband/rxe1/ports/1/state
pass "the HCA's port goes down with it"
