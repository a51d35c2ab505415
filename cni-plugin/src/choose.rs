//! Which netdev an ADD works with: chosen by configuration and allocation, freed from owners
//! that are no more, looked at.

use std::{path::Path, time::Duration};

use cni_wire::{Code, Error};
use hca::HcaId;

use crate::{
    config::{Attach, Config, Target},
    detach::{self, living, stranded},
    find::{self, Found, Missing},
    journal::{Key, RdmaDevice, Record, store::Lock},
    kernel::{
        Name, Socket,
        link::{self, By, Link},
        route,
    },
    netdev::{
        replay,
        restore::{self, bring_home},
        snapshot::{Identity, Snapshot},
    },
    node::Node,
    plan, rdma,
};

/// The netdev to work with.
#[derive(Debug)]
pub struct Chosen {
    /// What is known of it.
    pub found: Found,
    /// For a move: nobody else moves it meanwhile.
    pub lock: Option<Lock>,
    /// The name it is to have at home, where another netdev has it at present.
    pub true_name: Option<Name>,
}

/// Chooses the netdev of a request.
///
/// # Errors
/// Code 7 when the request does not say, or there is none; code 11 when another pod has it.
pub fn choose(node: &mut Node, config: &Config, inside: &mut Socket) -> Result<Chosen, Error> {
    if config.link_in_container {
        let link = in_pod(inside, config.master.as_deref())?;
        let found = Found {
            link,
            ..Found::default()
        };
        return Ok(Chosen {
            found,
            lock: None,
            true_name: None,
        });
    }
    let moves = plan::kind(config) == plan::Kind::Known(Attach::Move);
    let target = match target(config, moves) {
        // As the reference plugins do, where the policy gives uplinks away at all.
        Err(e) if !moves && config.allocation.is_none() && node.policy.allow.uplinks => {
            Target::Name(way_out(&mut node.socket)?.ok_or(e)?.name.to_string())
        }
        target => target?,
    };
    if !moves {
        let name = match find::name_of(&node.host, &target, config.port) {
            // Moved into a pod, it carries no children of the host's.
            Err(Missing::Netdev(e)) => return Err(e),
            named => named?,
        };
        let found = look(node, &name)?;
        return Ok(Chosen {
            found,
            lock: None,
            true_name: None,
        });
    }
    let name = match find::name_of(&node.host, &target, config.port) {
        Ok(name) => name,
        Err(Missing::Netdev(error)) => {
            fetch_from_the_dead(node, &target, error)?;
            find::name_of(&node.host, &target, config.port)?
        }
        Err(Missing::Other(error)) => return Err(error),
    };
    if link::get(&mut node.socket, By::Name(name.as_bytes()))?.is_none() {
        let error = Error::new(
            Code::InvalidConfig,
            format!("netdev {name} does not exist on this host"),
        );
        fetch_from_the_dead(node, &target, error)?;
    }
    let link = get(node, &name)?;
    let identity = Identity::on(&node.host, &link);
    let lock = node.store.lock(&identity)?;
    let true_name = settle_claim(node, &identity)?;
    // Its name may have been repaired just now.
    let link = identity
        .find(&link::list(&mut node.socket)?)
        .map(|link| link.name.to_string());
    let found = look(node, &link.unwrap_or(name))?;
    Ok(Chosen {
        found,
        lock: Some(lock),
        true_name,
    })
}

/// The pod's interface that a child is to stand on: the one that is named, else the pod's way
/// out.
fn in_pod(inside: &mut Socket, master: Option<&str>) -> Result<Link, Error> {
    let missing = |what: String| Error::new(Code::InvalidConfig, format!("master: {what}"));
    let link = match master {
        Some(name) => link::get(inside, By::Name(name.as_bytes()))?
            .ok_or_else(|| missing(format!("the pod has no interface {name}")))?,
        None => way_out(inside)?.ok_or_else(|| {
            missing("none is named, and the pod has no default route that would say which".into())
        })?,
    };
    if let Some(controller) = link.controller
        && link.port_kind.as_deref() != Some("vrf")
    {
        let controller = link::get(inside, By::Index(controller))?.unwrap_or_default();
        return Err(missing(format!(
            "{} is a port of {} in the pod, which carries no children",
            link.name, controller.name
        ))
        .with_details(format!("name {} itself", controller.name)));
    }
    Ok(link)
}

/// The netdev of the default route with the lowest metric.
fn way_out(socket: &mut Socket) -> Result<Option<Link>, Error> {
    for family in route::FAMILIES {
        let mut defaults = route::list_table(socket, family, replay::MAIN)?;
        defaults.retain(replay::is_default);
        let best = defaults.iter().min_by_key(|route| replay::metric(route));
        if let Some(index) = best.and_then(replay::leaves_through)
            && let Some(link) = link::get(socket, By::Index(index))?
        {
            return Ok(Some(link));
        }
    }
    Ok(None)
}

/// Refuses a macvlan where there are ipvlans and the other way about: both want the only handler
/// of received frames that a netdev has (`netdev_rx_handler_register()`).
///
/// Children in pods are known from the journal, those on the host from sysfs; of those that are
/// neither, the kernel's EBUSY tells.
///
/// # Errors
/// Code 7 naming the child that is there.
pub fn check_rivals(node: &mut Node, link: &Link, attach: Attach) -> Result<(), Error> {
    let (Attach::Macvlan | Attach::Ipvlan) = attach else {
        return Ok(());
    };
    let refuse = |kind: &str, whose: String| {
        Err(Error::new(
            Code::InvalidConfig,
            format!(
                "attach {} on {} is refused: it carries {kind} children ({whose}), and a netdev \
                 carries children of one of these kinds",
                attach.as_str(),
                link.name
            ),
        )
        .with_details(format!("set attach to {kind}, or name another netdev")))
    };
    for name in uppers(&node.host.sys, &link.name.to_string()) {
        let upper = link::get(&mut node.socket, By::Name(name.as_bytes()))?;
        match upper
            .and_then(|upper| upper.kind)
            .map(|kind| kind.to_string())
        {
            Some(kind) if kind == attach.as_str() => return Ok(()),
            Some(kind) if matches!(kind.as_str(), "macvlan" | "ipvlan") => {
                return refuse(&kind, format!("{name} of the host"));
            }
            _ => {}
        }
    }
    for (_, record) in readable(node)? {
        if record.boot != node.boot {
            continue;
        }
        let Some(child) = record.child.as_ref().filter(|c| c.index == link.index) else {
            continue;
        };
        // One is enough: the kernel lets no two kinds meet.
        if living(&record)?.is_some() {
            return match child.kind == attach.as_str() {
                true => Ok(()),
                false => refuse(&child.kind, record.owner()),
            };
        }
    }
    Ok(())
}

/// The records of this node that can be read. The others are logged: they are no reason to refuse
/// another attachment.
fn readable(node: &Node) -> Result<Vec<(Key, Record)>, Error> {
    let (records, unreadable) = node.store.records()?;
    for one in &unreadable {
        node.log.warn(one);
    }
    Ok(records)
}

/// Netdevs of the host's namespace that stand on one of it (`upper_*` in sysfs).
fn uppers(sys: &Path, name: &str) -> Vec<String> {
    let entries = std::fs::read_dir(sys.join("class/net").join(name));
    let names = entries.into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        name.strip_prefix("upper_").map(str::to_owned)
    });
    names.collect()
}

/// Which netdev the configuration and the allocation mean.
fn target(config: &Config, moves: bool) -> Result<Target, Error> {
    if let Some(master) = config.master.as_ref().filter(|_| !moves) {
        return Ok(Target::Name(master.clone()));
    }
    if let Some(device) = config.device.as_ref().filter(|_| moves) {
        return Ok(device.clone());
    }
    match &config.allocation {
        Some(allocation) => match allocation.unit.hca() {
            Some(hca) => Ok(Target::Hca(hca.clone())),
            None => Err(Error::new(
                Code::InvalidConfig,
                format!(
                    "deviceID {} is a share of several HCAs and names none",
                    allocation.text
                ),
            )
            .with_details("name the netdev with master")),
        },
        None if moves => Err(
            Error::new(Code::InvalidConfig, "nothing says which netdev to move").with_details(
                "set device, hwaddr, kernelpath, pciBusID or rdmaDevice, or let Multus pass a \
             deviceID (k8s.v1.cni.cncf.io/resourceName)",
            ),
        ),
        None => Err(Error::new(
            Code::InvalidConfig,
            "nothing says which netdev to build upon",
        )
        .with_details(
            "set master, or let Multus pass a deviceID (k8s.v1.cni.cncf.io/resourceName)",
        )),
    }
}

fn get(node: &mut Node, name: &str) -> Result<Link, Error> {
    link::get(&mut node.socket, By::Name(name.as_bytes()))?.ok_or_else(|| {
        Error::new(
            Code::InvalidConfig,
            format!("netdev {name} does not exist on this host"),
        )
    })
}

fn look(node: &mut Node, name: &str) -> Result<Found, Error> {
    let known = node.known_addresses();
    let selectors = node.policy.allow.netdevs.is_some();
    find::look(&node.host, &mut node.socket, name, selectors, &known)
}

/// The netdev is not on the host. When the journal knows that it was given to a pod that is no
/// more, it is waited for and restored; when that pod lives, it is in use.
fn fetch_from_the_dead(node: &mut Node, target: &Target, missing: Error) -> Result<(), Error> {
    for (_, record) in readable(node)? {
        let Some(taken) = record
            .moved
            .as_ref()
            .filter(|taken| is_meant(target, taken, &record.rdma))
        else {
            continue;
        };
        if record.boot != node.boot {
            continue;
        }
        if living(&record)?.is_some() {
            return Err(Error::new(
                Code::TryAgain,
                format!("{} is in use by {}", taken.name, record.owner()),
            )
            .with_details("it comes back when that pod is deleted"));
        }
        let _lock = node.store.lock(&taken.identity)?;
        let home =
            bring_home(&mut node.ground(), taken, None, restore::ON_ITS_WAY).map_err(stranded)?;
        detach::report(node, taken, &home);
        return rdma::bring_home(node, &record.rdma, None, restore::ON_ITS_WAY);
    }
    Err(missing)
}

fn is_meant(target: &Target, taken: &Snapshot, rdma: &[RdmaDevice]) -> bool {
    match target {
        Target::Name(name) => {
            taken.name == *name || taken.altnames.iter().any(|known| *known == *name)
        }
        Target::Mac(mac) => {
            let mac = mac.to_string();
            taken.identity.mac == mac || taken.identity.permanent_mac.as_ref() == Some(&mac)
        }
        Target::Hca(HcaId::NodeGuid(guid)) => {
            let guid = guid.to_string();
            rdma.iter().any(|d| d.node_guid.as_ref() == Some(&guid))
        }
        Target::Hca(hca) => taken
            .identity
            .bus_device
            .as_ref()
            .is_some_and(|device| *device == hca.to_string()),
        Target::KernelPath(path) => taken
            .identity
            .bus_device
            .as_ref()
            .is_some_and(|device| path.split('/').next_back() == Some(device)),
        Target::RdmaDevice(name) => rdma.iter().any(|device| device.name == *name),
    }
}

/// With the netdev's lock held and the netdev on the host: whoever owned it before did not
/// return it. It is restored for them now, so that their DEL, should it still come, finds
/// nothing to do. Returns the name it is to have where that could not be given back.
fn settle_claim(node: &mut Node, identity: &Identity) -> Result<Option<Name>, Error> {
    let Some(claim) = node.store.claim(identity)? else {
        return Ok(None);
    };
    let mut true_name = None;
    if claim.boot == node.boot
        && let Some((key, _, _)) = Key::parse(&claim.owner)
        && let Some(record) = node.store.read(&key)?
        && let Some(taken) = &record.moved
    {
        let home = bring_home(&mut node.ground(), taken, None, Duration::ZERO).map_err(stranded)?;
        detach::report(node, taken, &home);
        true_name = home.goes_by.is_some().then(|| taken.name.clone());
        rdma::bring_home(node, &record.rdma, None, Duration::ZERO)?;
        if record.ipam.is_none() {
            node.store.forget(&key)?;
        } else {
            node.store.replace(
                &key,
                &Record {
                    moved: None,
                    rdma: Vec::new(),
                    ..record.clone()
                },
            )?;
        }
    }
    node.store.release(identity)?;
    Ok(true_name)
}
