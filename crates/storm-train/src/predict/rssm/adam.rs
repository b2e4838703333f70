//! The optimizer of the controller: Adam with gradient clipping.

use storm_device::simd_dispatch;

/// Parameters and their moments.
pub(super) struct Adam {
    parameters: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
    steps: u32,
}

const RATE: f32 = 3e-3;
const BETAS: [f32; 2] = [0.9, 0.99];
const EPSILON: f32 = 1e-6;
const NORM_MAX: f32 = 10.0;

impl Adam {
    pub(super) fn new(parameters: Vec<f32>) -> Adam {
        let zeros = vec![0.0; parameters.len()];
        Adam { parameters, first: zeros.clone(), second: zeros, steps: 0 }
    }

    pub(super) fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    pub(super) fn steps(&self) -> u32 {
        self.steps
    }

    /// Parameters and both moments.
    pub(super) fn vectors(&self) -> [&Vec<f32>; 3] {
        [&self.parameters, &self.first, &self.second]
    }

    pub(super) fn restore(&mut self, [parameters, first, second]: [Vec<f32>; 3], steps: u32) {
        *self = Adam { parameters, first, second, steps };
    }

    /// Takes a step. Skips it if the gradients are not finite.
    pub(super) fn step(&mut self, gradients: &[f32]) {
        let norm = gradients.iter().map(|gradient| gradient * gradient).sum::<f32>().sqrt();
        if !norm.is_finite() {
            return;
        }
        let scale = (NORM_MAX / norm).min(1.0);
        self.steps = self.steps.saturating_add(1);
        let exponent = i32::try_from(self.steps).unwrap_or(i32::MAX);
        let corrections = BETAS.map(|beta| 1.0 - beta.powi(exponent));
        update(
            &mut self.parameters,
            gradients,
            [&mut self.first, &mut self.second],
            scale,
            corrections,
        );
    }
}

simd_dispatch! {
    fn update(
        parameters: &mut [f32], gradients: &[f32], moments: [&mut [f32]; 2], scale: f32,
        corrections: [f32; 2],
    ) {
        let [first, second] = moments;
        let moments = first.iter_mut().zip(second);
        for ((parameter, gradient), (first, second)) in
            parameters.iter_mut().zip(gradients).zip(moments)
        {
            let gradient = gradient * scale;
            *first = BETAS[0] * *first + (1.0 - BETAS[0]) * gradient;
            *second = BETAS[1] * *second + (1.0 - BETAS[1]) * gradient * gradient;
            let (mean, square) = (*first / corrections[0], *second / corrections[1]);
            *parameter -= RATE * mean / (square.sqrt() + EPSILON);
        }
    }
}
