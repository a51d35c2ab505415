//! Reservations: one address among all ranges of a network name.
//!
//! Of those that this node's broker made or took over, what was last read is kept: it leads from an
//! attachment to its reservations, and is what a removal names as its precondition. Where it is out of
//! date, the removal is refused, and nothing is lost but a request.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use ipam::whereabouts::reservation_name;
use node_wire::{AttachmentId, Failure, FailureKind};

use super::failure;
use crate::api::whereabouts::{Lease, Objects, ReservationObject};
use crate::api::{Changed, Created};

/// How often one object is read again that others change at the same time.
const ATTEMPTS: usize = 5;

/// What became of an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reserved {
    /// It is reserved for the pod's interface.
    Held,
    /// It is this other pod's, or another interface's.
    Taken(String),
}

/// The reservations, and those of this node.
#[derive(Debug)]
pub(crate) struct Reservations {
    objects: Objects,
    node: String,
    /// By name; with the number of the last list when it came.
    own: RefCell<BTreeMap<String, (u64, ReservationObject)>>,
    lists: Cell<u64>,
    listed: Cell<bool>,
}

impl Reservations {
    pub(super) fn new(objects: Objects, node: &str) -> Self {
        Self {
            objects,
            node: node.to_owned(),
            own: RefCell::default(),
            lists: Cell::new(0),
            listed: Cell::new(false),
        }
    }

    fn note(&self, object: ReservationObject) {
        let name = object.metadata.object.name.clone();
        let noted = (self.lists.get(), object);
        self.own.borrow_mut().insert(name, noted);
    }

    fn forget(&self, name: &str) {
        self.own.borrow_mut().remove(name);
    }

    fn known(&self, name: &str) -> Option<ReservationObject> {
        let own = self.own.borrow();
        own.get(name).map(|(_, object)| object.clone())
    }

    /// Reads those of this node, unless they were read before.
    pub(super) async fn know(&self) -> Result<(), Failure> {
        match self.listed.get() {
            true => Ok(()),
            false => self.list().await,
        }
    }

    /// Reads those of this node.
    pub(super) async fn list(&self) -> Result<(), Failure> {
        let number = self.lists.get() + 1;
        self.lists.set(number);
        let mut listed = Vec::new();
        let read = self
            .objects
            .reservations_of_node(&self.node, |object| listed.push(object));
        read.await.map_err(|error| failure(&error))?;
        // What came while the list was read stays.
        let mut own = self.own.borrow_mut();
        own.retain(|_, (noted, _)| *noted >= number);
        for object in listed {
            let name = object.metadata.object.name.clone();
            own.entry(name).or_insert((number, object));
        }
        self.listed.set(true);
        Ok(())
    }

    /// All of this node, with container and interface.
    pub(super) fn all(&self) -> Vec<(AttachmentId, Lease)> {
        let own = self.own.borrow();
        let own = own.values().filter_map(|(_, object)| {
            let lease = object.lease()?;
            let id = AttachmentId {
                container: lease.container.clone(),
                interface: object.spec.ifname.clone(),
            };
            Some((id, lease))
        });
        own.collect()
    }

    /// Those of an attachment.
    pub(super) fn of(&self, attachment: &AttachmentId) -> Vec<Lease> {
        let own = self.all().into_iter();
        let own = own.filter(|(id, _)| id == attachment);
        own.map(|(_, lease)| lease).collect()
    }

    /// Reserves an address for a pod's interface, or takes over a reservation that it has.
    pub(super) async fn reserve(
        &self,
        pod: &str,
        interface: &str,
        lease: &Lease,
    ) -> Result<Reserved, Failure> {
        let name = reservation_name(lease.address, lease.network_name.as_deref());
        let object = ReservationObject::new(&name, pod, interface, lease);
        for _ in 0..ATTEMPTS {
            match self.objects.create_reservation(&object).await {
                Ok(Created::New(made)) => {
                    self.note(made);
                    return Ok(Reserved::Held);
                }
                Ok(Created::Taken) => {}
                // Reading it says whether it was made.
                Err(error) if error.is_uncertain() => {}
                Err(error) => return Err(failure(&error)),
            }
            let read = self.objects.reservation(&name).await;
            let Some(read) = read.map_err(|error| failure(&error))? else {
                continue;
            };
            if read.spec.podref != pod || read.spec.ifname != interface {
                return Ok(Reserved::Taken(read.spec.podref));
            }
            if read.lease().as_ref() == Some(lease) {
                self.note(read);
                return Ok(Reserved::Held);
            }
            let metadata = &read.metadata.object;
            let noted = self.objects.note_in_reservation(metadata, lease).await;
            if let Changed::Done(noted) = noted.map_err(|error| failure(&error))? {
                self.note(noted);
                return Ok(Reserved::Held);
            }
        }
        Err(contended(&name))
    }

    /// Removes a reservation that this broker made, if nobody has taken it over.
    pub(super) async fn withdraw(&self, lease: &Lease) -> Result<(), Failure> {
        let name = reservation_name(lease.address, lease.network_name.as_deref());
        let Some(known) = self.known(&name) else {
            return Ok(());
        };
        if known.lease().as_ref() != Some(lease) {
            return Ok(());
        }
        let metadata = &known.metadata.object;
        let removed = self.objects.delete_reservation(metadata).await;
        removed.map_err(|error| failure(&error))?;
        self.forget(&name);
        Ok(())
    }

    /// Removes the reservation of an address, whoever made it, if it is of this pod and interface.
    pub(super) async fn release(
        &self,
        name: &str,
        pod: &str,
        interface: &str,
    ) -> Result<(), Failure> {
        for _ in 0..ATTEMPTS {
            let read = match self.known(name) {
                Some(known) => Some(known),
                None => {
                    let read = self.objects.reservation(name).await;
                    read.map_err(|error| failure(&error))?
                }
            };
            let Some(read) = read else {
                return Ok(());
            };
            // An old whereabouts names no interface.
            let same_interface = read.spec.ifname == interface || read.spec.ifname.is_empty();
            if read.spec.podref != pod || !same_interface {
                self.forget(name);
                return Ok(());
            }
            let metadata = &read.metadata.object;
            let removed = self.objects.delete_reservation(metadata).await;
            let removed = removed.map_err(|error| failure(&error))?;
            self.forget(name);
            if removed != Changed::Conflict {
                return Ok(());
            }
        }
        Err(contended(name))
    }
}

fn contended(name: &str) -> Failure {
    let why = format!("OverlappingRangeIPReservation {name} is changed by others all the time");
    Failure::new(FailureKind::ClusterUnavailable, why)
}
