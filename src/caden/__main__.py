from caden.cli import main

main()
