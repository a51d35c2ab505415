/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * An InfiniBand port on soft RoCE's engine: for the test lab's guests only,
 * built at test time and never shipped. See README.md in this folder.
 */
#ifndef RXE_IB_H
#define RXE_IB_H

/* Beside soft RoCE's own types of a network. */
#define RXE_NETWORK_TYPE_IB 3
#define RXE_IB_PKEYS 16
#define RXE_IB_VFS 8

struct rxe_ib_state {
	struct list_head hcas;		/* all of the driver, for a VF to find its PF */
	struct rxe_dev *rxe;
	struct net_device *ndev;	/* the cable */
	u16 pkeys[RXE_IB_PKEYS];
	u32 smi_index;			/* of queue pair 0; 0 without one */
	bool managed;			/* waits for a subnet manager */
	struct { u64 node, port; int link; } vf[RXE_IB_VFS];	/* of a PF */
};

void rxe_ib_set_ops(struct rxe_dev *rxe);
void rxe_ib_init_av(struct rdma_ah_attr *attr, struct rxe_av *av);
void rxe_ib_av_to_attr(struct rxe_av *av, struct rdma_ah_attr *attr);
struct sk_buff *rxe_ib_init_packet(struct rxe_dev *rxe, int paylen, struct rxe_pkt_info *pkt);
int rxe_ib_prepare(struct rxe_av *av, struct rxe_pkt_info *pkt, struct sk_buff *skb);
int rxe_ib_out(struct sk_buff *skb, struct rxe_pkt_info *pkt);
int rxe_ib_check_keys(struct rxe_dev *rxe, struct rxe_pkt_info *pkt, struct rxe_qp *qp);
u16 rxe_ib_pkey(struct rxe_qp *qp, u16 gsi_index);
void rxe_ib_wc(struct rxe_pkt_info *pkt, struct ib_wc *wc);
void rxe_ib_user_wc(struct rxe_pkt_info *pkt, struct ib_uverbs_wc *uwc);
void rxe_ib_last_wqe(struct rxe_qp *qp);
int rxe_ib_start(void);
void rxe_ib_stop(void);
#endif
