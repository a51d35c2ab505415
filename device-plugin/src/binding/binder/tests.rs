use node_server::socket::NodeSocket;

use super::*;

/// A binder of a node whose kubelet does not answer: what would call it is not run.
pub(crate) fn binder(paths: &Arc<NodePaths>) -> Binder {
    let readers = Readers::default();
    let pods = Pods::new(&readers, paths, "n1".into());
    let (socket, _) = NodeSocket::new("node.sock".into());
    let report = Report::new(Default::default(), socket, readers.clone());
    Binder::new(
        &readers,
        paths.clone(),
        Arc::new(pods),
        watch::channel(Arc::new(report)).1,
        Triggers::new().0,
        Arc::new(Store::at(&paths.run_dir)),
    )
}

#[tokio::test]
async fn no_question_waits_while_the_kubelet_is_asked_for_another() {
    let dir = tempfile::tempdir().unwrap();
    let paths = Arc::new(NodePaths::all_in(dir.path()));
    let binder = binder(&paths);
    let question = BindQuestion {
        pod: Pod {
            namespace: "a".into(),
            name: "b".into(),
            uid: None,
        },
        sandbox: "s".into(),
        unit: "slot_3e71787e_0".into(),
    };
    let slots = ["slot_3e71787e_0".to_owned()];
    let unbind = UnbindQuestion {
        sandbox: "other".into(),
        units: Vec::new(),
    };
    let (bind, start) = (binder.bind(question), binder.start("rdma/nic", &slots));
    tokio::select! {
        bound = bind => panic!("{bound:?}"),
        started = start => panic!("{started:?}"),
        unbound = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            binder.unbind(unbind).await
        } => assert_eq!(unbound.unwrap().hcas, Vec::<String>::new()),
    }
}

#[test]
fn nothing_is_bound_for_an_add_that_is_over() {
    let before = Instant::now();
    let unbound = [(Instant::now(), "s".to_owned())];
    let now = Instant::now();
    let is_awaited = |sandbox, asked| is_awaited(&unbound, sandbox, asked).is_ok();
    assert!(!is_awaited(Some("s"), before));
    assert!(is_awaited(Some("s"), now), "a later ADD");
    assert!(is_awaited(Some("other"), before));
    let long_ago = now.checked_sub(BIND_TIMEOUT).unwrap();
    assert!(!is_awaited(Some("other"), long_ago));
    assert!(is_awaited(None, long_ago), "the start of a container");
}
