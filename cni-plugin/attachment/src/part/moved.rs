//! A netdev of the host that goes into a pod, with its RDMA devices in exclusive mode.

use std::{
    fmt, thread,
    time::{Duration, Instant},
};

use cni_wire::Code;
use netlink::{
    Name, Namespace, Socket,
    link::{self, By, Change, Link},
};
use serde::{Deserialize, Serialize};

use super::{Interface, Part, vf};
use crate::{
    error::{Error, Kind},
    interface::InterfaceConfig,
    journal::{Key, RdmaDevice, Record, Slot},
    netdev::{
        identity::LinkScope,
        restore::{self, Returned},
        snapshot::Snapshot,
    },
    node::{HostNetns, Node},
    rdma::{self, DeviceNodes},
};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Move {
    pub interface: Interface,
    /// Its state on the host, which is restored, and what is set of a VF.
    pub host: Snapshot,
    /// Its HCAs, as units name them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hcas: Vec<String>,
    /// RDMA devices that move with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rdma: Vec<RdmaDevice>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slots: Vec<Slot>,
    /// It is back on the host, and all is undone but this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub returned: Option<Defect>,
}

/// What keeps a netdev that is back on the host from being as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Defect {
    /// Another netdev has its name.
    Name,
    /// The VF may have settings of the attachment: its PF is not on the host.
    Vf,
    /// A child of the pod is on it, and would receive what the next pod receives.
    Child,
}

impl Move {
    /// Sets what the network asks of a VF. Returns the netdev as it is on the host then.
    pub(crate) fn apply_vf(&self, node: &mut Node, nodes: DeviceNodes) -> Result<Link, Error> {
        let link = self.on_host(node)?;
        vf::apply(node, &self.host, link, nodes)
    }

    /// The netdev on the host, before it moves. A driver that was bound again has made another one of
    /// the same identity.
    ///
    /// # Errors
    /// Code 11: it is not there.
    pub(crate) fn on_host(&self, node: &mut Node) -> Result<Link, Error> {
        let socket = &mut node.netns.socket;
        let same = link::get(socket, By::Index(self.host.identity.index))?;
        let mut found = restore::find_on_host(node, &self.host, same.as_slice())?.cloned();
        if found.is_none() {
            let links = link::list(&mut node.netns.socket)?;
            found = restore::find_on_host(node, &self.host, &links)?.cloned();
        }
        found.ok_or_else(|| {
            let what = format!("{} left the host meanwhile", self.host.name);
            Error::new(Code::TryAgain, what)
                .with_details("another pod was quicker to take it, or it was removed; try again")
        })
    }

    /// Moves the netdev, which `nic` is on the host; it is in the pod then, down. RDMA devices moved
    /// before.
    ///
    /// # Errors
    /// The kernel's refusal; code 11 where a netdev of IP over InfiniBand does not come.
    pub(crate) fn apply(
        &self,
        host: &mut HostNetns,
        pod: &Namespace,
        inside: &mut Socket,
        nic: &Link,
    ) -> Result<Link, Error> {
        // The driver makes IPoIB netdevs anew when their RDMA device has moved.
        let is_anew = nic.is_infiniband() && !self.rdma.is_empty();
        let moved = match is_anew {
            true => self.take_anew(host, pod, inside)?,
            false => self.transfer(host, pod, inside, nic)?,
        };
        let mut mtu = self.interface.mtu;
        if is_anew {
            // It has the driver's mode, and with that another MTU.
            for (number, value) in &self.host.state.ipoib_mode {
                let what = format_args!("set the mode of {}", self.interface.name);
                link::set_info(inside, what, moved.index, "ipoib", (*number, value))?;
            }
            mtu = mtu.or(Some(nic.mtu));
        }
        // A VF may have its MAC address by its PF.
        self.interface.set(inside, &moved, mtu)?;
        Ok(moved)
    }

    /// One request: the host sees a netdev go, and no name in between that a daemon could react to. The
    /// move takes it down, so that also kernels before 6.2 rename it (`do_setlink()`).
    fn transfer(
        &self,
        host: &mut HostNetns,
        pod: &Namespace,
        inside: &mut Socket,
        nic: &Link,
    ) -> Result<Link, Error> {
        let name = self.interface.name.as_str();
        // An alternative name that the pod knows stands in the way of the whole netdev.
        for altname in &nic.altnames {
            if *altname == *name || link::get(inside, By::Name(altname.as_bytes()))?.is_some() {
                link::remove_altname(&mut host.socket, nic, altname)?;
            }
        }
        let change = Change {
            netns: Some(pod),
            ..Change::name(name.as_bytes())
        };
        let what = format!("move {} into {} as {name}", nic.name, pod.path().display());
        link::change(&mut host.socket, what, nic.index, &change)?;
        self.named(inside)
    }

    fn named(&self, inside: &mut Socket) -> Result<Link, Error> {
        let name = &self.interface.name;
        link::get(inside, By::Name(name.as_bytes()))?.ok_or_else(|| {
            let what = format!("{name} went away while it was moved");
            Error::new(Code::TryAgain, what)
        })
    }

    /// A netdev of IP over InfiniBand ends when its RDMA device leaves a namespace, and is made anew
    /// by the driver when it has arrived; in which of the two, kernels differ. It is waited for in
    /// both and gets its name in the pod.
    fn take_anew(
        &self,
        host: &mut HostNetns,
        pod: &Namespace,
        inside: &mut Socket,
    ) -> Result<Link, Error> {
        let name = self.interface.name.as_str();
        let identity = &self.host.identity;
        let started = Instant::now();
        loop {
            let in_pod = LinkScope::Pod { host: None };
            if let Ok(Some(link)) = identity.find(&link::list(inside)?, in_pod) {
                let what = format!("set {} down", link.name);
                link::change(inside, what, link.index, &Change::down())?;
                let what = format!("name {} {name}", link.name);
                link::change(inside, what, link.index, &Change::name(name.as_bytes()))?;
                return self.named(inside);
            }
            let links = link::list(&mut host.socket)?;
            if let Ok(Some(link)) = identity.find(&links, LinkScope::Host) {
                return self.transfer(host, pod, inside, link);
            }
            if started.elapsed() > restore::RETURN_TIMEOUT {
                let what = format!(
                    "{} was not made anew after its RDMA device had moved",
                    self.host.name
                );
                return Err(
                    Error::new(Code::TryAgain, what).with_details("is the module ib_ipoib loaded?")
                );
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns the netdev to the host and restores it, unless it belongs to another attachment by now.
    ///
    /// # Errors
    /// It is not on the host within `timeout`.
    pub(crate) fn undo(
        &self,
        node: &mut Node,
        key: &Key,
        pod: Option<&Namespace>,
        timeout: Duration,
    ) -> Result<Returned, Error> {
        let identity = &self.host.identity;
        let _lock = node.journal.lock(identity)?;
        match node.journal.claimant(identity)? {
            Some(owner) if owner == *key => self.give_back(node, pod, timeout),
            // It was never moved, or is another attachment's by now.
            _ => Ok(Returned::default()),
        }
    }

    /// Returns the netdev, which an orphaned attachment left, for another one. Call with its lock held.
    /// Returns its name on the host, where another netdev has that at present.
    ///
    /// # Errors
    /// It is not on the host yet, or no pod can have it.
    pub fn reclaim(&self, node: &mut Node, record: &Record) -> Result<Option<Name>, Error> {
        let returned = self.give_back(node, None, restore::RETURN_TIMEOUT)?;
        match self.unusable(&returned, record) {
            Some(unusable) => Err(unusable),
            None => Ok(returned.is_misnamed.then(|| self.host.name.clone())),
        }
    }

    /// RDMA devices first: netdevs of InfiniBand are on them.
    fn give_back(
        &self,
        node: &mut Node,
        pod: Option<&Namespace>,
        timeout: Duration,
    ) -> Result<Returned, Error> {
        let devices = rdma::return_devices(node, &self.rdma, pod, timeout);
        let returned = restore::return_netdev(node, &self.host, pod, timeout)?;
        self.report(node, &returned);
        devices?;
        if returned.defect().is_none() {
            node.journal.release(&self.host.identity)?;
        }
        Ok(returned)
    }

    /// Ends the claim of an earlier boot, which says nothing any more.
    pub(crate) fn disown(&self, node: &Node, key: &Key) -> Result<(), Error> {
        let identity = &self.host.identity;
        let _lock = node.journal.lock(identity)?;
        match node.journal.claimant(identity)? {
            Some(owner) if owner == *key => node.journal.release(identity),
            _ => Ok(()),
        }
    }

    fn report(&self, node: &Node, returned: &Returned) {
        for warning in &returned.warnings {
            node.log.warn(warning);
        }
        for note in &returned.notes {
            node.log.info(note);
        }
        let name = &self.host.name;
        match returned.hardware_gone {
            true => node.log.warn(format_args!(
                "{name} is gone from the host; nothing to restore"
            )),
            false => node.log.info(format_args!("{name} is back on the host")),
        }
    }

    /// Whether a VF still has what was set of it.
    ///
    /// # Errors
    /// Code 104 naming the setting; the kernel's refusal.
    pub fn check(&self, node: &mut Node) -> Result<(), Error> {
        let Some(vf) = &self.host.vf else {
            return Ok(());
        };
        match vf.check(&node.roots, &mut node.netns.socket)? {
            None => Ok(()),
            Some(unset) => Err(Error::new(
                Code::Differs,
                format!("VF {} has lost {unset}", self.host.name),
            )),
        }
    }
}

impl Move {
    /// Why no pod can have the netdev, which is back on the host, if so.
    pub(crate) fn unusable(&self, returned: &Returned, record: &Record) -> Option<Error> {
        let defect = returned.defect()?;
        let (what, remedy) = match defect {
            Defect::Name => return None,
            Defect::Vf => {
                let (name, owner) = (&self.host.name, record.owner());
                let why = returned.vf_kept.as_deref().unwrap_or_default();
                (
                    format!("{name} may have VF settings of {owner}: {why}"),
                    "no pod gets the VF until they are restored: return the PF's netdev to the host, \
                     then run rdmactl reclaim, or let the next ADD do it",
                )
            }
            Defect::Child => (
                self.left_child(record),
                "no pod gets the netdev until the child is gone: end what holds that namespace (lsns \
                 -t net shows those of processes); the daemon asks the kernel again, and so does the \
                 next ADD",
            ),
        };
        Some(Error::of(Kind::Kept(defect), what).with_details(remedy))
    }

    /// What is kept of it for a repair.
    pub(crate) fn left_with(&self, defect: Defect) -> Part {
        Part::Move(Box::new(Move {
            interface: Interface {
                config: InterfaceConfig::default(),
                ..self.interface.clone()
            },
            rdma: Vec::new(),
            slots: Vec::new(),
            returned: Some(defect),
            ..self.clone()
        }))
    }

    /// That the netdev carries a child, after it has returned.
    #[must_use]
    pub fn left_child(&self, record: &Record) -> String {
        format!(
            "{} carries a macvlan or ipvlan in another network namespace, made by {}",
            self.host.name,
            record.owner()
        )
    }
}

impl fmt::Display for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "move {}", self.host.name)?;
        match self.host.vf.as_ref().filter(|vf| !vf.set.is_empty()) {
            Some(vf) => write!(f, "; VF {}", vf.set),
            None => Ok(()),
        }
    }
}
