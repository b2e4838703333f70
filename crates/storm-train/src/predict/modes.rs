//! Dynamic mode decomposition by the method of snapshots: extrapolates a tensor whose differences
//! follow a linear recurrence.
//!
//! A window has [`INTERVALS`] intervals of equal length. x₀, x₁, … are the differences of a tensor
//! over them, the last one up to now. Suppose a linear map A takes each difference to the next.
//! Then A is known on all but the last. Least squares express the last as a combination of the
//! earlier ones, xₙ₋₁ ≈ Σ cⱼ xⱼ, so A takes it to Σ cⱼ xⱼ₊₁, and so on. The input is only the inner
//! products of the differences, and the output is a factor for each difference.

/// Intervals of a window.
pub(super) const INTERVALS: usize = 4;

/// Inner products of differences.
pub(super) type Gram = [[f64; INTERVALS]; INTERVALS];

/// All differences but the last.
const KNOWN: usize = INTERVALS - 1;

/// Eigenvalues below this fraction of the largest are rounding errors.
const RANK_LIMIT: f64 = 1e-9;

/// Factors of the differences whose sum is the total difference over the next window. All zero if
/// any is not finite.
pub(super) fn factors(gram: &Gram) -> [f64; INTERVALS] {
    let recurrence = least_squares(gram);
    // Each difference as a combination of the known ones: first the known ones themselves, then the
    // extrapolated ones.
    let mut next = [[0.0; INTERVALS]; 2 * INTERVALS];
    for (at, difference) in next.iter_mut().enumerate().take(INTERVALS) {
        difference[at] = 1.0;
    }
    let mut sum = [0.0; INTERVALS];
    for at in INTERVALS..2 * INTERVALS {
        for (back, factor) in recurrence.iter().enumerate() {
            let before = next[at - KNOWN + back];
            next[at].iter_mut().zip(before).for_each(|(x, b)| *x += factor * b);
        }
        sum.iter_mut().zip(next[at]).for_each(|(sum, x)| *sum += x);
    }
    if sum.iter().all(|factor: &f64| factor.is_finite()) { sum } else { [0.0; INTERVALS] }
}

/// The least-norm c that minimizes ‖x − Σ cⱼ xⱼ‖, where x is the last difference.
fn least_squares(gram: &Gram) -> [f64; KNOWN] {
    let mut matrix = [[0.0; KNOWN]; KNOWN];
    for (row, known) in matrix.iter_mut().zip(gram) {
        row.copy_from_slice(&known[..KNOWN]);
    }
    let (values, vectors) = eigen(matrix);
    let largest = values.iter().fold(0.0, |most: f64, value| most.max(*value));
    let mut solution = [0.0; KNOWN];
    for (value, vector) in values.iter().zip(vectors) {
        if *value <= RANK_LIMIT * largest {
            continue;
        }
        let along: f64 = (0..KNOWN).map(|j| vector[j] * gram[j][KNOWN]).sum();
        solution.iter_mut().zip(vector).for_each(|(x, v)| *x += along / value * v);
    }
    solution
}

/// Eigenvalues and eigenvectors of a symmetric matrix, by Jacobi rotations.
fn eigen(mut a: [[f64; KNOWN]; KNOWN]) -> ([f64; KNOWN], [[f64; KNOWN]; KNOWN]) {
    // Convergence is quadratic, so far fewer are enough.
    const SWEEPS: usize = 30;
    let mut vectors = [[0.0; KNOWN]; KNOWN];
    for (at, vector) in vectors.iter_mut().enumerate() {
        vector[at] = 1.0;
    }
    for _ in 0..SWEEPS {
        for p in 0..KNOWN {
            for q in p + 1..KNOWN {
                if a[p][q] == 0.0 {
                    continue;
                }
                let theta = (a[q][q] - a[p][p]) / (2.0 * a[p][q]);
                let tangent = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
                let cosine = 1.0 / (tangent * tangent + 1.0).sqrt();
                let sine = tangent * cosine;
                for row in &mut a {
                    (row[p], row[q]) =
                        (cosine * row[p] - sine * row[q], sine * row[p] + cosine * row[q]);
                }
                for k in 0..KNOWN {
                    (a[p][k], a[q][k]) =
                        (cosine * a[p][k] - sine * a[q][k], sine * a[p][k] + cosine * a[q][k]);
                    (vectors[p][k], vectors[q][k]) = (
                        cosine * vectors[p][k] - sine * vectors[q][k],
                        sine * vectors[p][k] + cosine * vectors[q][k],
                    );
                }
            }
        }
    }
    (std::array::from_fn(|at| a[at][at]), vectors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_graph::random::Random;

    fn gram(differences: &[Vec<f64>]) -> Gram {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum();
        std::array::from_fn(|i| std::array::from_fn(|j| dot(&differences[i], &differences[j])))
    }

    /// A linear system: each mode decays independently, and every element is a sum of modes.
    #[test]
    fn a_linear_system_is_extrapolated_exactly() {
        let mut random = Random(3);
        for rates in [&[0.9_f64][..], &[0.95, 0.5], &[0.97, 0.7, -0.4], &[1.0, 0.8]] {
            let modes: Vec<Vec<f64>> = rates
                .iter()
                .map(|_| (0..50).map(|_| 2.0 * random.unit() - 1.0).collect())
                .collect();
            let difference = |at: usize| -> Vec<f64> {
                let element = |i: usize| {
                    rates.iter().zip(&modes).map(|(r, mode)| r.powi(at as i32) * mode[i]).sum()
                };
                (0..50).map(element).collect()
            };
            let known: Vec<Vec<f64>> = (0..INTERVALS).map(difference).collect();
            let factors = factors(&gram(&known));
            for i in 0..50 {
                let want: f64 = (INTERVALS..2 * INTERVALS).map(|at| difference(at)[i]).sum();
                let got: f64 = factors.iter().zip(&known).map(|(f, x)| f * x[i]).sum();
                assert!((got - want).abs() < 1e-5, "{rates:?}, element {i}: {got}, not {want}");
            }
        }
    }

    /// Checks that the residual of least squares on random differences is orthogonal.
    #[test]
    fn the_last_difference_is_fitted_as_well_as_can_be() {
        let mut random = Random(8);
        for _ in 0..20 {
            let known: Vec<Vec<f64>> = (0..INTERVALS)
                .map(|_| (0..9).map(|_| 2.0 * random.unit() - 1.0).collect())
                .collect();
            let gram = gram(&known);
            let solution = least_squares(&gram);
            // The residual is orthogonal to all regressors.
            for (j, row) in gram.iter().enumerate().take(KNOWN) {
                let fitted: f64 = (0..KNOWN).map(|k| row[k] * solution[k]).sum();
                assert!((fitted - row[KNOWN]).abs() < 1e-9, "{j}");
            }
        }
    }

    #[test]
    fn what_does_not_move_or_is_not_finite_goes_nowhere() {
        assert_eq!(factors(&[[0.0; INTERVALS]; INTERVALS]), [0.0; INTERVALS]);
        assert_eq!(factors(&[[f64::NAN; INTERVALS]; INTERVALS]), [0.0; INTERVALS]);
        assert_eq!(factors(&[[f64::INFINITY; INTERVALS]; INTERVALS]), [0.0; INTERVALS]);
    }
}
