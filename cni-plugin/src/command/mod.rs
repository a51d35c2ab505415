//! The commands of the specification, each from request to answer.

pub mod add;
pub mod check;
pub mod del;
pub mod gc;
pub mod status;

use std::{fmt::Display, path::Path, time::Instant};

use attachment::{
    log::{Log, PROGRAM},
    node::{Node, Places},
};
use cni_wire::{Code, Command, Request};
use netlink::Namespace;
use node::{calls, policy::Policy};
use serde_json::Value;

use crate::error::Error;

/// Serves one call. What it fails with is logged: the runtime may show it to the pod's user alone.
pub fn run(places: &Places, request: &Request) -> Result<Option<Value>, Error> {
    let started = Instant::now();
    let subject = node::log::subject(request);
    let answer = serve(places, request, subject.clone()).inspect_err(|error| {
        // What can be read of a wrong policy says where the log is.
        let (policy, _) = Policy::load_for_release(&places.policy);
        Log::new(&policy.log, PROGRAM, &subject).failure(request.command(), error);
    });
    let code = answer.as_ref().err().map(|error| error.code);
    let file = calls::file_of(&places.root, PROGRAM);
    calls::count(&file, request.command(), code, started.elapsed());
    answer
}

fn serve(places: &Places, request: &Request, subject: String) -> Result<Option<Value>, Error> {
    match request.command() {
        Command::Add => {
            let node = Node::open(places, subject)?;
            node.journal.check_owner()?;
            add::run(node, request).map(Some)
        }
        Command::Del => del::run(for_release(places, subject)?, request).map(|()| None),
        Command::Check => check::run(Node::open(places, subject)?, request).map(|()| None),
        Command::Status => status::run(places, subject, request).map(|_| None),
        Command::Gc => gc::run(for_release(places, subject)?, request).map(|()| None),
        // Answered before a request was made.
        Command::Version => Ok(None),
    }
}

/// For what must go on with a wrong policy, which is logged.
fn for_release(places: &Places, subject: String) -> Result<Node, Error> {
    let node = Node::open_for_release(places, subject)?;
    if let Some(fault) = &node.policy.fault {
        node.log.warn(fault.with_remedy());
    }
    Ok(node)
}

/// The pod's namespace of an ADD or CHECK.
///
/// # Errors
/// Code 8: it is not there, or it is the host's own.
fn pod_namespace(node: &Node, request: &Request) -> Result<Namespace, Error> {
    let path = request.env.netns.as_deref().unwrap_or_default();
    let wrong = |what: &dyn Display| Error::new(Code::InvalidNetns, what);
    let pod = Namespace::open(Path::new(path)).map_err(|e| wrong(&e))?;
    let pod = pod.ok_or_else(|| {
        wrong(&format_args!(
            "CNI_NETNS {path} is missing or is not a network namespace"
        ))
    })?;
    if pod.id() == node.netns.namespace.id() && !request.env.netns_override {
        return Err(Error::advise(
            Code::InvalidNetns,
            format_args!("CNI_NETNS {path} is the namespace this plugin runs in, the host's"),
            "set CNI_NETNS_OVERRIDE=1 if this is meant",
        ));
    }
    Ok(pod)
}
