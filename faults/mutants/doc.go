// Package mutants tests the checkers. It builds the simulation and the rig with a product that has one mistake in it, and wants
// each mistake found by the violations that follow from it; and it wants nothing found of the product as it is.
//
//	go test ./mutants                                           # all of them
//	go test ./mutants -short                                    # a few, in the simulation only
//	go test ./mutants -run 'TestSimulation/no_local_deadline' -v    # one, and the violation that finds it
//
// A mutant is some edits of the product's sources. The product has no seam for them: the go command's -overlay gives the compiler
// edited copies in place of the files.
//
// To add one, put it into the table in mutants_test.go: what the mistake is, the kinds of violations that are a find, and the
// edits. What is replaced must be in its file exactly once, so that a mutant whose code has changed fails instead of testing
// nothing. Keep the kinds narrow: a crash, or a violation of another kind, is no find. Where no world of the simulation shows the
// mistake, it is the simulation or the checker that has to learn something. Name a class of the rig's faults as well if the rig
// finds the mistake within seconds and it is one that everybody makes: that takes real time.
package mutants
