use super::super::tests::prove;
use super::*;
use crate::verdict::Verdict::{Fail, NotApplicable, Pass, Warn};

fn hcas(number: usize, faulty: usize) -> Vec<PoolHca> {
    let hca = |n: usize| PoolHca {
        id: format!("mlx5_{n}"),
        fault: (n < faulty).then(|| "port 1 is down".to_owned()),
    };
    (0..number).map(hca).collect()
}

fn pools(pools: &[(&str, usize, usize)]) -> Facts {
    let pool = |(name, number, faulty): &(&str, usize, usize)| {
        ((*name).to_owned(), hcas(*number, *faulty))
    };
    Facts {
        hcas: hcas(8, 0),
        pools: Some(pools.iter().map(pool).collect()),
        ..Facts::default()
    }
}

fn expecting(text: &str, facts: Facts) -> Facts {
    Facts {
        expected: vec![text.parse().unwrap()],
        ..facts
    }
}

fn node(number: usize, faulty: usize) -> Facts {
    Facts {
        hcas: hcas(number, faulty),
        ..Facts::default()
    }
}

#[test]
fn each_check_says_what_is_wrong() {
    let container = Facts {
        in_pod: true,
        ..Facts::default()
    };
    let two = |faulty| pools(&[("rdma/a", 2, faulty)]);
    let cases = [
        ("H01", node(8, 0), Pass, "8 of them"),
        ("H01", node(0, 0), Fail, "no RDMA device"),
        ("H01", container, NotApplicable, ""),
        ("H02", node(8, 0), NotApplicable, "no configuration"),
        ("H02", pools(&[("rdma/a", 8, 1)]), Pass, "7 of 8"),
        ("H02", pools(&[("rdma/a", 1, 1)]), Fail, "port 1 is down"),
        (
            "H02",
            pools(&[("rdma/a", 8, 0), ("rdma/b", 0, 0)]),
            Warn,
            "choose no HCA",
        ),
        ("H02", pools(&[("rdma/a", 0, 0)]), Fail, "nor do those"),
        (
            "H02",
            Facts {
                optional: ["rdma/vf".to_owned()].into(),
                ..pools(&[("rdma/vf", 0, 0)])
            },
            NotApplicable,
            "optional",
        ),
        ("H03", node(8, 0), NotApplicable, ""),
        ("H03", expecting("8", node(8, 0)), Pass, "8 can be used"),
        (
            "H03",
            expecting("8", node(8, 1)),
            Fail,
            "7 of 8 can be used, 8 are here: mlx5_0: port 1",
        ),
        ("H03", expecting("8", node(7, 0)), Fail, "7 are here"),
        ("H03", expecting("8", node(0, 0)), Fail, "0 of 8"),
        ("H03", expecting("rdma/a=2", two(0)), Pass, ""),
        ("H03", expecting("rdma/a=2", two(1)), Fail, "1 of 2"),
        ("H03", expecting("rdma/x=1", two(0)), Fail, "no pool has"),
        ("H03", expecting("rdma/x=0", two(0)), Pass, ""),
        (
            "H03",
            expecting("rdma/a=2", node(8, 0)),
            Fail,
            "no configuration",
        ),
    ];
    prove(CHECKS, &cases);
}

#[test]
fn an_expectation_is_a_number_with_or_without_a_resource() {
    for wrong in ["", "x", "rdma/a=", "rdma/a=-1", "=2", "="] {
        let error = wrong.parse::<Expected>().unwrap_err().to_string();
        assert!(error.contains("rdma/rails=8"), "{error}");
    }
    let expected: Expected = "rdma/a=2".parse().unwrap();
    assert_eq!(
        (expected.resource.as_deref(), expected.hcas),
        (Some("rdma/a"), 2)
    );
}
