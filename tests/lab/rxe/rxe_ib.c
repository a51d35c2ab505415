// SPDX-License-Identifier: GPL-2.0-only
/*
 * An InfiniBand port on soft RoCE's engine: for the test lab's guests only,
 * built at test time and never shipped. See README.md in this folder.
 *
 * A frame on the Ethernet cable is broadcast, with an ethertype of its own:
 * GRH (40 bytes), a stand-in for the LRH (8 bytes, where soft RoCE has its UDP
 * header), BTH and so on. The code for ICRC, loopback and multicast runs as it
 * is. A port without a subnet manager answers its own queries of subnet
 * administration; LIDs follow from GUIDs, so no two nodes need to agree.
 */
#include <linux/if_ether.h>
#include <linux/if_link.h>
#include <linux/pci.h>
#include <linux/etherdevice.h>
#include <net/addrconf.h>
#include <rdma/ib_smi.h>
#include <rdma/ib_sa.h>
#include <rdma/rdma_netlink.h>
#include "rxe.h"
#include "rxe_loc.h"
#include "rxe_ib.h"

#define IB_FRAME 0x88b6	/* IEEE 802, local experimental 2 */
#define HEADERS_BYTES (sizeof(struct ipv6hdr) + sizeof(struct udphdr))
#define MULTICAST_LID 0xc000
#define LRH_GRH 0x100	/* in udp->check: the packet has a GRH; low bits: SL */

static const u8 everyone[ETH_ALEN] = { 255, 255, 255, 255, 255, 255 };

/* addresses */

static u16 lid_of_guid(__be64 guid)
{
	return (u16)be64_to_cpu(guid) % 0xbffe + 1;
}

static u16 lid_of_mgid(const u8 *mgid)
{
	u16 hash = mgid[5] ^ mgid[12], i;

	for (i = 13; i < 16; i++)
		hash = hash * 31 + mgid[i];
	return MULTICAST_LID + hash % 0x3ffe;
}

/* The place of an Ethernet address holds the DLID (2 bytes), the SL, and whether there is a GRH. */
static u16 av_dlid(const struct rxe_av *av)
{
	return av->dmac[0] << 8 | av->dmac[1];
}

void rxe_ib_init_av(struct rdma_ah_attr *attr, struct rxe_av *av)
{
	u16 dlid = rdma_ah_get_dlid(attr);

	memset(av, 0, sizeof(*av));
	av->port_num = rdma_ah_get_port_num(attr);
	av->network_type = RXE_NETWORK_TYPE_IB;
	av->dmac[0] = dlid >> 8;
	av->dmac[1] = dlid;
	av->dmac[2] = rdma_ah_get_sl(attr);
	if (rdma_ah_get_ah_flags(attr) & IB_AH_GRH) {
		const struct ib_global_route *grh = rdma_ah_read_grh(attr);

		av->dmac[3] = 1;
		memcpy(av->grh.dgid.raw, grh->dgid.raw, 16);
		av->grh.flow_label = grh->flow_label;
		av->grh.sgid_index = grh->sgid_index;
		av->grh.hop_limit = grh->hop_limit;
		av->grh.traffic_class = grh->traffic_class;
	}
}

void rxe_ib_av_to_attr(struct rxe_av *av, struct rdma_ah_attr *attr)
{
	attr->type = RDMA_AH_ATTR_TYPE_IB;
	rdma_ah_set_port_num(attr, av->port_num);
	rdma_ah_set_dlid(attr, av_dlid(av));
	rdma_ah_set_sl(attr, av->dmac[2]);
	if (av->dmac[3])
		rdma_ah_set_grh(attr, (union ib_gid *)av->grh.dgid.raw, av->grh.flow_label,
				av->grh.sgid_index, av->grh.hop_limit, av->grh.traffic_class);
}

/* sending */

struct sk_buff *rxe_ib_init_packet(struct rxe_dev *rxe, int paylen, struct rxe_pkt_info *pkt)
{
	unsigned int room = HEADERS_BYTES + LL_RESERVED_SPACE(rxe->ib->ndev);
	struct sk_buff *skb = alloc_skb(paylen + room, GFP_ATOMIC);

	if (!skb)
		return NULL;
	skb_reserve(skb, room);
	skb->dev = rxe->ib->ndev;
	skb->protocol = htons(ETH_P_IPV6);
	pkt->rxe = rxe;
	pkt->port_num = 1;
	pkt->hdr = skb_put(skb, paylen);
	pkt->mask |= RXE_GRH_MASK;
	return skb;
}

int rxe_ib_prepare(struct rxe_av *av, struct rxe_pkt_info *pkt, struct sk_buff *skb)
{
	struct rxe_port *port = &pkt->rxe->port;
	struct udphdr *lrh = __skb_push(skb, sizeof(*lrh));
	struct ipv6hdr *grh;

	skb_reset_transport_header(skb);
	lrh->dest = htons(av_dlid(av));
	lrh->source = av_dlid(av) == 0xffff ? lrh->dest : htons(port->attr.lid);
	lrh->len = htons(skb->len);
	lrh->check = htons((av->dmac[3] ? LRH_GRH : 0) | av->dmac[2]);

	grh = __skb_push(skb, sizeof(*grh));
	skb_reset_network_header(skb);
	memset(grh, 0, sizeof(*grh));
	ip6_flow_hdr(grh, av->grh.traffic_class, htonl(av->grh.flow_label & 0xfffff));
	grh->payload_len = htons(skb->len - sizeof(*grh));
	grh->nexthdr = 0x1b;
	grh->hop_limit = av->grh.hop_limit;
	memcpy(&grh->saddr, &port->subnet_prefix, 8);
	memcpy((u8 *)&grh->saddr + 8, &port->port_guid, 8);
	memcpy(&grh->daddr, av->grh.dgid.raw, 16);

	if (port->attr.lid && av_dlid(av) == port->attr.lid)
		pkt->mask |= RXE_LOOPBACK_MASK;
	return 0;
}

static void ib_deliver(struct rxe_dev *rxe, struct sk_buff *skb)
{
	struct rxe_pkt_info *pkt = SKB_TO_PKT(skb);
	struct udphdr *lrh = (struct udphdr *)(skb_network_header(skb) + sizeof(struct ipv6hdr));

	memset(pkt, 0, sizeof(*pkt));
	pkt->rxe = rxe;
	pkt->port_num = 1;
	pkt->hdr = (u8 *)(lrh + 1);
	pkt->mask = RXE_GRH_MASK;
	pkt->paylen = ntohs(lrh->len) - sizeof(*lrh);
	skb_pull(skb, HEADERS_BYTES);
	rxe_rcv(skb);
}

/* Puts a prepared packet on the cable; the caller has set its socket and destructor. */
int rxe_ib_out(struct sk_buff *skb, struct rxe_pkt_info *pkt)
{
	struct rxe_dev *rxe = pkt->rxe;
	u16 dlid = ntohs(udp_hdr(skb)->dest);

	/* Other queue pairs of this HCA in the group receive it. */
	if (dlid >= MULTICAST_LID && dlid != 0xffff) {
		struct sk_buff *copy = skb_copy(skb, GFP_ATOMIC);

		if (copy && ib_device_try_get(&rxe->ib_dev))
			ib_deliver(rxe, copy);
		else
			kfree_skb(copy);
	}
	skb->dev = rxe->ib->ndev;
	skb->protocol = htons(IB_FRAME);
	dev_hard_header(skb, skb->dev, IB_FRAME, everyone, skb->dev->dev_addr, skb->len);
	skb_reset_mac_header(skb);
	return dev_queue_xmit(skb);
}

struct net_device *rxe_ib_cable(struct ib_device *dev)
{
	struct rxe_dev *rxe = to_rdev(dev);

	if (!rxe->ib)
		return NULL;
	dev_hold(rxe->ib->ndev);
	return rxe->ib->ndev;
}

/* receiving */

static int ib_frame_rcv(struct sk_buff *skb, struct net_device *dev,
			struct packet_type *pt, struct net_device *orig)
{
	struct rxe_dev *rxe = NULL;
	struct udphdr *lrh;
	u16 dlid;

	skb = skb_share_check(skb, GFP_ATOMIC);
	if (!skb)
		return NET_RX_DROP;
	rxe = rxe_get_dev_from_net(skb->dev);
	if (!rxe)
		goto drop;
	if (!rxe->ib || rxe->port.attr.state == IB_PORT_DOWN || skb_linearize(skb) || skb->len < HEADERS_BYTES + RXE_BTH_BYTES)
		goto put;
	skb_reset_network_header(skb);
	lrh = (struct udphdr *)(skb->data + sizeof(struct ipv6hdr));
	dlid = ntohs(lrh->dest);
	if (dlid < MULTICAST_LID && dlid != rxe->port.attr.lid)
		goto put;
	if (ntohs(lrh->len) < sizeof(*lrh) + RXE_BTH_BYTES ||
	    sizeof(struct ipv6hdr) + ntohs(lrh->len) > skb->len ||
	    pskb_trim(skb, sizeof(struct ipv6hdr) + ntohs(lrh->len)))
		goto put;
	skb->protocol = htons(ETH_P_IPV6);
	ib_deliver(rxe, skb);
	return NET_RX_SUCCESS;
put:
	ib_device_put(&rxe->ib_dev);
drop:
	kfree_skb(skb);
	return NET_RX_DROP;
}

static struct packet_type ib_frames = {
	.type = cpu_to_be16(IB_FRAME),
	.func = ib_frame_rcv,
};

static int find_pkey(struct rxe_dev *rxe, u16 pkey)
{
	int i;

	for (i = 0; i < RXE_IB_PKEYS; i++)
		if (pkey_match(rxe->ib->pkeys[i], pkey))
			return i;
	return -1;
}

int rxe_ib_check_keys(struct rxe_dev *rxe, struct rxe_pkt_info *pkt, struct rxe_qp *qp)
{
	u16 pkey = bth_pkey(pkt);
	int index;

	pkt->pkey_index = 0;
	if (qp->ibqp.qp_type == IB_QPT_SMI)
		return 0;
	if (qp->ibqp.qp_type == IB_QPT_GSI) {
		index = find_pkey(rxe, pkey);
	} else {
		index = qp->attr.pkey_index;
		if (index >= RXE_IB_PKEYS || !pkey_match(rxe->ib->pkeys[index], pkey))
			index = -1;
	}
	if (index < 0) {
		rxe->port.attr.bad_pkey_cntr = min(0xffffU, rxe->port.attr.bad_pkey_cntr + 1);
		return -EINVAL;
	}
	pkt->pkey_index = index;
	if (qp->ibqp.qp_type == IB_QPT_UD || qp->ibqp.qp_type == IB_QPT_GSI) {
		u32 qkey = qp->ibqp.qp_type == IB_QPT_GSI ? GSI_QKEY : qp->attr.qkey;

		if (deth_qkey(pkt) != qkey) {
			rxe->port.attr.qkey_viol_cntr = min(0xffffU, rxe->port.attr.qkey_viol_cntr + 1);
			return -EINVAL;
		}
	}
	return 0;
}

u16 rxe_ib_pkey(struct rxe_qp *qp, u16 gsi_index)
{
	struct rxe_dev *rxe = to_rdev(qp->ibqp.device);
	u16 index = qp->ibqp.qp_type == IB_QPT_GSI ? gsi_index : qp->attr.pkey_index;

	if (qp->ibqp.qp_type == IB_QPT_SMI || index >= RXE_IB_PKEYS)
		return IB_DEFAULT_PKEY_FULL;
	return rxe->ib->pkeys[index];
}

static struct udphdr *lrh_of(struct rxe_pkt_info *pkt)
{
	return (struct udphdr *)pkt->hdr - 1;
}

void rxe_ib_wc(struct rxe_pkt_info *pkt, struct ib_wc *wc)
{
	struct udphdr *lrh = lrh_of(pkt);

	wc->wc_flags &= ~(IB_WC_GRH | IB_WC_WITH_NETWORK_HDR_TYPE);
	if (ntohs(lrh->check) & LRH_GRH)
		wc->wc_flags |= IB_WC_GRH;
	wc->network_hdr_type = RDMA_NETWORK_IB;
	wc->slid = ntohs(lrh->source);
	wc->sl = ntohs(lrh->check) & 15;
	wc->pkey_index = pkt->pkey_index;
}

void rxe_ib_user_wc(struct rxe_pkt_info *pkt, struct ib_uverbs_wc *uwc)
{
	struct udphdr *lrh = lrh_of(pkt);

	if (!(ntohs(lrh->check) & LRH_GRH))
		uwc->wc_flags &= ~IB_WC_GRH;
	uwc->slid = ntohs(lrh->source);
	uwc->sl = ntohs(lrh->check) & 15;
	uwc->pkey_index = pkt->pkey_index;
}

/* management */

#define RATE IB_RATE_100_GBPS
#define EQUAL (2 << 6)

static void notify(struct rxe_dev *rxe, enum ib_event_type type)
{
	struct ib_event event = { .device = &rxe->ib_dev, .element.port_num = 1, .event = type };

	ib_dispatch_event(&event);
}

/* What a subnet manager decides for this port. */
static void set_port_info(struct rxe_dev *rxe, const struct ib_port_info *pi)
{
	struct ib_port_attr *attr = &rxe->port.attr;
	u16 lid = attr->lid, sm_lid = attr->sm_lid;
	u8 state = pi->linkspeed_portstate & 15;

	attr->lid = ntohs(pi->lid);
	attr->sm_lid = ntohs(pi->sm_lid);
	attr->sm_sl = pi->neighbormtu_mastersmsl & 15;
	attr->subnet_timeout = pi->clientrereg_resv_subnetto & 31;
	if (pi->gid_prefix)
		rxe->port.subnet_prefix = pi->gid_prefix;
	if (lid != attr->lid)
		notify(rxe, IB_EVENT_LID_CHANGE);
	if (sm_lid != attr->sm_lid)
		notify(rxe, IB_EVENT_SM_CHANGE);
	if (state > attr->state && attr->state >= IB_PORT_INIT) {
		attr->state = state;
		if (state == IB_PORT_ACTIVE)
			notify(rxe, IB_EVENT_PORT_ACTIVE);
	}
	if (pi->clientrereg_resv_subnetto & 0x80)
		notify(rxe, IB_EVENT_CLIENT_REREGISTER);
}

static bool smp_reply(struct rxe_dev *rxe, const struct ib_smp *in, struct ib_smp *out)
{
	struct rxe_port *port = &rxe->port;
	bool set = in->method == IB_MGMT_METHOD_SET;

	switch (in->attr_id) {
	case IB_SMP_ATTR_NODE_DESC:
		memcpy(out->data, rxe->ib_dev.node_desc, 64);
		return !set;
	case IB_SMP_ATTR_NODE_INFO: {
		struct ib_node_info *ni = (void *)out->data;

		memset(out->data, 0, 64);
		ni->base_version = 1;
		ni->class_version = 1;
		ni->node_type = 1;
		ni->num_ports = 1;
		ni->sys_guid = rxe->attr.sys_image_guid;
		ni->node_guid = rxe->ib_dev.node_guid;
		ni->port_guid = port->port_guid;
		ni->partition_cap = htons(RXE_IB_PKEYS);
		ni->local_port_num = 1;
		return !set;
	}
	case IB_SMP_ATTR_GUID_INFO:
		memset(out->data, 0, 64);
		if (!in->attr_mod)
			memcpy(out->data, &port->port_guid, 8);
		return true;
	case IB_SMP_ATTR_PORT_INFO: {
		struct ib_port_info *pi = (void *)out->data;

		if (set && rxe->ib->managed)
			set_port_info(rxe, (void *)in->data);
		memset(out->data, 0, 64);
		pi->gid_prefix = port->subnet_prefix;
		pi->lid = htons(port->attr.lid);
		pi->sm_lid = htons(port->attr.sm_lid);
		pi->cap_mask = htonl(port->attr.port_cap_flags);
		pi->local_port_num = 1;
		pi->link_width_enabled = pi->link_width_supported = 3;
		pi->link_width_active = 2;
		pi->linkspeed_portstate = 1 << 4 | port->attr.state;
		pi->portphysstate_linkdown = (port->attr.state >= IB_PORT_INIT ? 5 : 2) << 4 | 2;
		pi->linkspeedactive_enabled = 1 << 4 | 1;
		pi->neighbormtu_mastersmsl = port->attr.active_mtu << 4;
		pi->vlcap_inittype = 1 << 4;
		pi->inittypereply_mtucap = IB_MTU_4096;
		pi->operationalvl_pei_peo_fpi_fpo = 1 << 4;
		pi->guid_cap = 1;
		pi->clientrereg_resv_subnetto = 18;
		pi->resv_resptimevalue = 16;
		return true;
	}
	case IB_SMP_ATTR_PKEY_TABLE: {
		int i;

		if (set && rxe->ib->managed && !(ntohl(in->attr_mod) & 0xffff)) {
			for (i = 0; i < RXE_IB_PKEYS; i++)
				rxe->ib->pkeys[i] = ntohs(((__be16 *)in->data)[i]);
			notify(rxe, IB_EVENT_PKEY_CHANGE);
		}
		memset(out->data, 0, 64);
		for (i = 0; i < RXE_IB_PKEYS && !(ntohl(in->attr_mod) & 0xffff); i++)
			((__be16 *)out->data)[i] = htons(rxe->ib->pkeys[i]);
		return true;
	}
	}
	return false;
}

struct mcmember {
	u8 mgid[16], port_gid[16];
	__be32 qkey;
	__be16 mlid;
	u8 mtu, tclass;
	__be16 pkey;
	u8 rate, life;
	__be32 sl_flow_hop;
	u8 scope_state, proxy;
} __packed;

struct pathrec {
	u8 service[8], dgid[16], sgid[16];
	__be16 dlid, slid;
	__be32 raw_flow_hop;
	u8 tclass, reversible_number;
	__be16 pkey, qos_sl;
	u8 mtu, rate, life, preference, rest[6];
} __packed;

static u16 sa_reply(struct rxe_dev *rxe, const struct ib_sa_mad *in, struct ib_sa_mad *out)
{
	struct rxe_port *port = &rxe->port;

	switch (ntohs(in->mad_hdr.attr_id)) {
	case IB_SA_ATTR_CLASS_PORTINFO: {
		struct ib_class_port_info *cpi = (void *)out->data;

		memset(out->data, 0, sizeof(out->data));
		cpi->base_version = 1;
		cpi->class_version = 2;
		cpi->capability_mask = htons(0x200);
		ib_set_cpi_resp_time(cpi, 16);
		ib_set_cpi_capmask2(cpi, 1 << 12);	/* send-only full members */
		return 0;
	}
	case IB_SA_ATTR_MC_MEMBER_REC: {
		struct mcmember *mc = (void *)out->data;

		if (in->mad_hdr.method == IB_SA_METHOD_DELETE)
			return 0;
		/* A partition this port is not in: the requester may not know the group. */
		if ((in->sa_hdr.comp_mask & IB_SA_MCMEMBER_REC_PKEY) && find_pkey(rxe, ntohs(mc->pkey)) < 0)
			return 0x0700;
		mc->qkey = htonl(0x0b1b);
		mc->mlid = htons(lid_of_mgid(mc->mgid));
		mc->mtu = EQUAL | port->attr.active_mtu;
		mc->tclass = 0;
		mc->rate = EQUAL | RATE;
		mc->life = EQUAL | 18;
		mc->sl_flow_hop = 0;
		mc->scope_state = (mc->mgid[1] & 15) << 4 | (mc->scope_state & 15);
		return 0;
	}
	case IB_SA_ATTR_PATH_REC: {
		struct pathrec *path = (void *)out->data;

		if (!(in->sa_hdr.comp_mask & IB_SA_PATH_REC_PKEY))
			path->pkey = htons(IB_DEFAULT_PKEY_FULL);
		if (in->sa_hdr.comp_mask & IB_SA_PATH_REC_DGID) {
			__be64 guid;

			memcpy(&guid, path->dgid + 8, 8);
			path->dlid = htons(path->dgid[0] == 0xff ? lid_of_mgid(path->dgid) : lid_of_guid(guid));
		}
		path->slid = htons(port->attr.lid);
		path->raw_flow_hop = 0;
		path->tclass = 0;
		path->reversible_number = 0x81;
		path->qos_sl = 0;
		path->mtu = EQUAL | port->attr.active_mtu;
		path->rate = EQUAL | RATE;
		path->life = EQUAL | 18;
		path->preference = 0;
		return 0;
	}
	}
	return 0x000c;
}

static int ib_process_mad(struct ib_device *dev, int flags, u32 port_num, const struct ib_wc *wc,
			  const struct ib_grh *grh, const struct ib_mad *in, struct ib_mad *out,
			  size_t *out_size, u16 *out_pkey)
{
	struct rxe_dev *rxe = to_rdev(dev);
	u8 method = in->mad_hdr.method;

	switch (in->mad_hdr.mgmt_class) {
	case IB_MGMT_CLASS_SUBN_LID_ROUTED:
	case IB_MGMT_CLASS_SUBN_DIRECTED_ROUTE:
		if (method != IB_MGMT_METHOD_GET && method != IB_MGMT_METHOD_SET)
			return IB_MAD_RESULT_SUCCESS;
		if (in->mad_hdr.attr_id == IB_SMP_ATTR_SM_INFO)
			return IB_MAD_RESULT_SUCCESS;
		*out = *in;
		out->mad_hdr.method = IB_MGMT_METHOD_GET_RESP;
		if (!smp_reply(rxe, (void *)in, (void *)out))
			out->mad_hdr.status = htons(0x000c);
		if (in->mad_hdr.mgmt_class == IB_MGMT_CLASS_SUBN_DIRECTED_ROUTE)
			out->mad_hdr.status |= IB_SMP_DIRECTION;
		return IB_MAD_RESULT_SUCCESS | IB_MAD_RESULT_REPLY;
	case IB_MGMT_CLASS_SUBN_ADM:
		if (rxe->ib->managed)
			return IB_MAD_RESULT_SUCCESS;
		if (method != IB_MGMT_METHOD_GET && method != IB_MGMT_METHOD_SET && method != IB_SA_METHOD_DELETE)
			return IB_MAD_RESULT_SUCCESS;
		*out = *in;
		out->mad_hdr.method = method == IB_SA_METHOD_DELETE ? IB_SA_METHOD_DELETE_RESP : IB_MGMT_METHOD_GET_RESP;
		out->mad_hdr.status = htons(sa_reply(rxe, (void *)in, (void *)out));
		return IB_MAD_RESULT_SUCCESS | IB_MAD_RESULT_REPLY;
	case IB_MGMT_CLASS_PERF_MGMT:
		if (method != IB_MGMT_METHOD_GET && method != IB_MGMT_METHOD_SET)
			return IB_MAD_RESULT_SUCCESS;
		*out = *in;
		out->mad_hdr.method = IB_MGMT_METHOD_GET_RESP;
		memset((u8 *)out + 40, 0, sizeof(*out) - 40);
		return IB_MAD_RESULT_SUCCESS | IB_MAD_RESULT_REPLY;
	}
	return IB_MAD_RESULT_SUCCESS;
}

/*
 * IPoIB's connected mode waits five seconds for this event. Linux 6.1's engine
 * does not send it. That of 6.12 sends it with the queue pair's state_lock held,
 * and IPoIB's handler posts to that queue pair, which takes the lock again: the
 * processor stops.
 */
void rxe_ib_last_wqe(struct rxe_qp *qp)
{
	struct ib_event event = { .device = qp->ibqp.device, .element.qp = &qp->ibqp, .event = IB_EVENT_QP_LAST_WQE_REACHED };

	if (qp->srq && qp->ibqp.event_handler)
		qp->ibqp.event_handler(&event, qp->ibqp.qp_context);
}

/* the device */

static int ib_port_immutable_get(struct ib_device *dev, u32 port, struct ib_port_immutable *immutable)
{
	struct rxe_dev *rxe = to_rdev(dev);

	immutable->core_cap_flags = RDMA_CORE_PORT_IBA_IB;
	immutable->pkey_tbl_len = rxe->port.attr.pkey_tbl_len;
	immutable->gid_tbl_len = rxe->port.attr.gid_tbl_len;
	immutable->max_mad_size = IB_MGMT_MAD_SIZE;
	return 0;
}

static enum rdma_link_layer ib_link_layer(struct ib_device *dev, u32 port)
{
	return IB_LINK_LAYER_INFINIBAND;
}

static int ib_port_query(struct ib_device *dev, u32 port, struct ib_port_attr *attr)
{
	struct rxe_dev *rxe = to_rdev(dev);

	*attr = rxe->port.attr;
	attr->subnet_prefix = be64_to_cpu(rxe->port.subnet_prefix);
	if (attr->state == IB_PORT_ACTIVE)
		attr->phys_state = IB_PORT_PHYS_STATE_LINK_UP;
	else if (dev_get_flags(rxe->ib->ndev) & IFF_UP)
		attr->phys_state = IB_PORT_PHYS_STATE_POLLING;
	else
		attr->phys_state = IB_PORT_PHYS_STATE_DISABLED;
	return 0;
}

static int ib_gid_query(struct ib_device *dev, u32 port, int index, union ib_gid *gid)
{
	struct rxe_dev *rxe = to_rdev(dev);

	memset(gid, 0, sizeof(*gid));
	if (index)
		return 0;
	gid->global.subnet_prefix = rxe->port.subnet_prefix;
	gid->global.interface_id = rxe->port.port_guid;
	return 0;
}

static int ib_pkey_query(struct ib_device *dev, u32 port, u16 index, u16 *pkey)
{
	if (index >= RXE_IB_PKEYS)
		return -EINVAL;
	*pkey = to_rdev(dev)->ib->pkeys[index];
	return 0;
}

/* A port of InfiniBand has none; the one of IPoIB is a client of the core. */
static struct net_device *ib_no_netdev(struct ib_device *dev, u32 port)
{
	return NULL;
}

static LIST_HEAD(hcas);
static DEFINE_MUTEX(hcas_lock);

static struct pci_dev *function_of(struct rxe_dev *rxe)
{
	struct device *dev = rxe->ib_dev.dev.parent;

	return dev && dev_is_pci(dev) ? to_pci_dev(dev) : NULL;
}

static int vf_of(struct rxe_dev *rxe)
{
	struct pci_dev *function = function_of(rxe);

	return function && function->is_virtfn ? pci_iov_vf_id(function) : -1;
}

static struct device *pf_of(struct rxe_dev *rxe)
{
	return &pci_physfn(function_of(rxe))->dev;
}

static void set_port_guid(struct rxe_dev *rxe, u64 guid)
{
	rxe->port.port_guid = cpu_to_be64(guid);
	if (!rxe->ib->managed)
		rxe->port.attr.lid = rxe->port.attr.sm_lid = lid_of_guid(rxe->port.port_guid);
	notify(rxe, IB_EVENT_GID_CHANGE);
	notify(rxe, IB_EVENT_LID_CHANGE);
}

static int vf_config(struct ib_device *dev, int vf, u32 port, struct ifla_vf_info *info)
{
	if (vf < 0 || vf >= RXE_IB_VFS)
		return -EINVAL;
	info->linkstate = to_rdev(dev)->ib->vf[vf].link;
	return 0;
}

static int vf_link(struct ib_device *dev, int vf, u32 port, int state)
{
	if (vf < 0 || vf >= RXE_IB_VFS)
		return -EINVAL;
	to_rdev(dev)->ib->vf[vf].link = state;
	return 0;
}

static int vf_set_guid(struct ib_device *dev, int vf, u32 port, u64 guid, int type)
{
	struct rxe_ib_state *other;

	if (vf < 0 || vf >= RXE_IB_VFS)
		return -EINVAL;
	if (type == IFLA_VF_IB_NODE_GUID) {	/* read when the VF's driver starts */
		to_rdev(dev)->ib->vf[vf].node = guid;
		return 0;
	}
	to_rdev(dev)->ib->vf[vf].port = guid;
	mutex_lock(&hcas_lock);
	list_for_each_entry(other, &hcas, hcas)
		if (vf_of(other->rxe) == vf && pf_of(other->rxe) == dev->dev.parent)
			set_port_guid(other->rxe, guid);
	mutex_unlock(&hcas_lock);
	return 0;
}

static int vf_get_guid(struct ib_device *dev, int vf, u32 port, struct ifla_vf_guid *node, struct ifla_vf_guid *port_guid)
{
	if (vf < 0 || vf >= RXE_IB_VFS)
		return -EINVAL;
	node->vf = port_guid->vf = vf;
	node->guid = to_rdev(dev)->ib->vf[vf].node;
	port_guid->guid = to_rdev(dev)->ib->vf[vf].port;
	return 0;
}

static ssize_t lab_pkeys_show(struct device *d, struct device_attribute *a, char *buf)
{
	struct rxe_dev *rxe = rdma_device_to_drv_device(d, struct rxe_dev, ib_dev);
	int i, at = 0;

	for (i = 0; i < RXE_IB_PKEYS; i++)
		if (rxe->ib->pkeys[i])
			at += sysfs_emit_at(buf, at, "0x%04x ", rxe->ib->pkeys[i]);
	return at + sysfs_emit_at(buf, at, "\n");
}

static ssize_t lab_pkeys_store(struct device *d, struct device_attribute *a, const char *buf, size_t n)
{
	struct rxe_dev *rxe = rdma_device_to_drv_device(d, struct rxe_dev, ib_dev);
	u16 table[RXE_IB_PKEYS] = {};
	int i = 0, used, value;

	while (i < RXE_IB_PKEYS && sscanf(buf, "%i%n", &value, &used) == 1) {
		table[i++] = value;
		buf += used;
	}
	memcpy(rxe->ib->pkeys, table, sizeof(table));
	notify(rxe, IB_EVENT_PKEY_CHANGE);
	return n;
}
static DEVICE_ATTR_RW(lab_pkeys);

static ssize_t lab_guid_store(struct device *d, struct device_attribute *a, const char *buf, size_t n)
{
	struct rxe_dev *rxe = rdma_device_to_drv_device(d, struct rxe_dev, ib_dev);
	u64 guid;

	if (kstrtou64(buf, 16, &guid))
		return -EINVAL;
	set_port_guid(rxe, guid);
	return n;
}
static DEVICE_ATTR_WO(lab_guid);

static ssize_t hca_type_show(struct device *d, struct device_attribute *a, char *buf)
{
	return sysfs_emit(buf, "SOFTIB\n");
}
static DEVICE_ATTR_RO(hca_type);

static struct attribute *ib_attributes[] = {
	&dev_attr_lab_pkeys.attr, &dev_attr_lab_guid.attr, &dev_attr_hca_type.attr, NULL,
};
static const struct attribute_group ib_group = { .attrs = ib_attributes };

static void ib_dealloc(struct ib_device *dev)
{
	struct rxe_dev *rxe = to_rdev(dev);

	mutex_lock(&hcas_lock);
	list_del(&rxe->ib->hcas);
	mutex_unlock(&hcas_lock);
	rxe_dealloc(dev);
	kfree(rxe->ib);
}

static const struct ib_device_ops ib_ops = {
	.owner = THIS_MODULE,
	.driver_id = RDMA_DRIVER_RXE,
	.dealloc_driver = ib_dealloc,
	.device_group = &ib_group,
	.get_link_layer = ib_link_layer,
	.get_netdev = ib_no_netdev,
	.get_port_immutable = ib_port_immutable_get,
	.get_vf_config = vf_config,
	.get_vf_guid = vf_get_guid,
	.process_mad = ib_process_mad,
	.query_gid = ib_gid_query,
	.query_pkey = ib_pkey_query,
	.query_port = ib_port_query,
	.set_vf_guid = vf_set_guid,
	.set_vf_link_state = vf_link,
};

/* Call before soft RoCE sets its own operations: of two the core keeps the first. */
void rxe_ib_set_ops(struct rxe_dev *rxe)
{
	struct ib_port_attr *attr = &rxe->port.attr;
	struct rxe_ib_state *other;

	ib_set_device_ops(&rxe->ib_dev, &ib_ops);
	mutex_lock(&hcas_lock);
	if (vf_of(rxe) >= 0) {
		rxe->attr.kernel_cap_flags |= IBK_VIRTUAL_FUNCTION;
		list_for_each_entry(other, &hcas, hcas) {
			int vf = vf_of(rxe);

			if (other->rxe->ib_dev.dev.parent != pf_of(rxe) || vf >= RXE_IB_VFS)
				continue;
			if (other->vf[vf].node)
				rxe->ib_dev.node_guid = cpu_to_be64(other->vf[vf].node);
			if (other->vf[vf].port)
				rxe->port.port_guid = cpu_to_be64(other->vf[vf].port);
		}
	}
	rxe->ib->rxe = rxe;
	list_add(&rxe->ib->hcas, &hcas);
	mutex_unlock(&hcas_lock);
	attr->gid_tbl_len = 8;
	attr->pkey_tbl_len = RXE_IB_PKEYS;
	attr->lid = attr->sm_lid = rxe->ib->managed ? 0 : lid_of_guid(rxe->port.port_guid);
	attr->active_width = IB_WIDTH_4X;
	attr->active_speed = IB_SPEED_EDR;
	attr->max_vl_num = 1;
	attr->subnet_timeout = 18;
	strscpy(rxe->ib_dev.node_desc, "rxe softib", sizeof(rxe->ib_dev.node_desc));
}

static int ib_new(const char *name, struct net_device *ndev, bool managed)
{
	struct rxe_dev *rxe = rxe_get_dev_from_net(ndev);
	int err;

	if (rxe) {
		ib_device_put(&rxe->ib_dev);
		return -EEXIST;
	}
	rxe = ib_alloc_device(rxe_dev, ib_dev);
	if (!rxe)
		return -ENOMEM;
	rxe->ib = kzalloc(sizeof(*rxe->ib), GFP_KERNEL);
	if (!rxe->ib) {
		ib_dealloc_device(&rxe->ib_dev);
		return -ENOMEM;
	}
	rxe->ib->ndev = ndev;
	rxe->ib->managed = managed;
	rxe->ib->pkeys[0] = IB_DEFAULT_PKEY_FULL;
#ifdef RXE_HAS_NDEV
	rxe->ndev = ndev;
	err = rxe_add(rxe, ndev->mtu, name);
#else
	ib_mark_name_assigned_by_user(&rxe->ib_dev);
	err = rxe_add(rxe, ndev->mtu, name, ndev);
#endif
	if (err)
		ib_dealloc_device(&rxe->ib_dev);
	return err;
}

static int ib_newlink(const char *name, struct net_device *ndev)
{
	return ib_new(name, ndev, false);
}

static int ib_newlink_sm(const char *name, struct net_device *ndev)
{
	return ib_new(name, ndev, true);
}

/* Waits for a subnet manager on the cable, and does not answer queries of subnet administration. */
static struct rdma_link_ops ib_link_ops_sm = {
	.type = "rxe_ib_sm",
	.newlink = ib_newlink_sm,
};

static struct rdma_link_ops ib_link_ops = {
	.type = "rxe_ib",
	.newlink = ib_newlink,
};

int rxe_ib_start(void)
{
	dev_add_pack(&ib_frames);
	rdma_link_register(&ib_link_ops);
	rdma_link_register(&ib_link_ops_sm);
	return 0;
}

void rxe_ib_stop(void)
{
	rdma_link_unregister(&ib_link_ops_sm);
	rdma_link_unregister(&ib_link_ops);
	dev_remove_pack(&ib_frames);
}
