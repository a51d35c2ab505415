# linkUp: a pool's NICs are set up when they appear, with its MTU; other links and an administrator's setting are left alone
# lab: nics=3 memory=640 binaries=rdma-device-plugin
# shellcheck shell=bash

for nic in 0 1 2; do
	make_hca eth$nic
	ip link set eth$nic down
done
cat >/tmp/pools.yaml <<'POOLS'
version: 1
rescanInterval: 1s
pools:
- {resource: rdma/up, mode: exclusive, linkUp: true, select: {ifNames: [eth0]}}
- {resource: rdma/as-it-is, mode: exclusive, select: {ifNames: [eth1]}}
POOLS
is_up() { ip -o link show up dev "$1" | grep -q .; }
is_down() { ! is_up "$1"; }
mkdir -p /var/lib/kubelet/device-plugins
start_daemon /tmp/pools.yaml
check "a NIC of the pool is set up" wait_for 20 is_up eth0
check "its port becomes active" wait_for 20 grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state
check "a NIC of another pool is left as it is" is_down eth1
check "so is one of no pool" is_down eth2

ip link set eth0 down
sleep 5
check "what an administrator sets down stays down" is_down eth0
sed -i 's/mode: exclusive, select/mode: exclusive, linkUp: true, select/' /tmp/pools.yaml
check "a pool that asks for it later gets it" wait_for 20 is_up eth1
check "the other one still stays down" is_down eth0

ip netns add elsewhere
ip link set eth0 netns elsewhere
wait_for 30 eval '! ip link show eth0'
sleep 3
ip -n elsewhere link set eth0 netns 1
check "a NIC that appears is set up, as after its driver was loaded" wait_for 20 is_up eth0
equal "once for each time it appeared" 3 "$(grep -c 'set up, by linkUp' "$LAB_OUT/rdma-device-plugin.log")"

mtu_is() { [ "$(cat "/sys/class/net/$1/mtu")" = "$2" ]; }
ip link set eth2 mtu 1300
sed -i '/eth0/s/linkUp: true/linkUp: {mtu: 1400}/' /tmp/pools.yaml
cat >>/tmp/pools.yaml <<'POOLS'
- {resource: rdma/mtu, mode: exclusive, linkUp: {mtu: 1400}, select: {ifNames: [eth2]}}
POOLS
check "a NIC of a pool with an MTU is set up" wait_for 20 is_up eth2
check "with that MTU" mtu_is eth2 1400
check "one that is up keeps its own" mtu_is eth0 1500
ip link set eth2 mtu 1300
sleep 3
check "an administrator's MTU stays" mtu_is eth2 1300
