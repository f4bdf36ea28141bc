package main

import (
	"fmt"
	"math"
	"slices"
)

// samples are the values of the rounds of one thing, in the order of the rounds.
type samples []float64

func (s samples) median() float64 { return s.quantile(0.5) }

// spread is half the interquartile range over the median: how far a usual round is from the median.
func (s samples) spread() float64 {
	m := s.median()
	if len(s) < 2 || m == 0 {
		return 0
	}
	return (s.quantile(0.75) - s.quantile(0.25)) / 2 / math.Abs(m)
}

// over is the ratio of each round to the same round of base, so that what the machine did meanwhile cancels out.
func (s samples) over(base samples) samples {
	return s.with(base, func(v, b float64) float64 { return v / b })
}

// minus is the difference of each round to the same round of base.
func (s samples) minus(base samples) samples {
	return s.with(base, func(v, b float64) float64 { return v - b })
}

func (s samples) times(factor float64) samples {
	return s.with(s, func(v, _ float64) float64 { return v * factor })
}

func (s samples) with(other samples, op func(a, b float64) float64) samples {
	values := make(samples, min(len(s), len(other)))
	for i := range values {
		values[i] = op(s[i], other[i])
	}
	return values
}

// quantile interpolates between neighbours; without values it is NaN.
func (s samples) quantile(q float64) float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s))
	at := q * float64(len(sorted)-1)
	i := int(at)
	if i+1 == len(sorted) {
		return sorted[i]
	}
	return sorted[i] + (at-float64(i))*(sorted[i+1]-sorted[i])
}

// interleave measures each name once in every round, in another order each time, so that drift and neighbours meet all of them
// alike. Round 0 comes before the others, to warm up, and does not count.
func interleave(rounds int, names []string, measure func(name string, round int) (float64, error)) (map[string]samples, error) {
	values := make(map[string]samples, len(names))
	for round := range rounds + 1 {
		for i := range names {
			name := names[(i+round)%len(names)]
			v, err := measure(name, round)
			if err != nil {
				return nil, fmt.Errorf("bench: round %d of %s: %w", round, name, err)
			}
			if round > 0 {
				values[name] = append(values[name], v)
			}
		}
	}
	return values, nil
}
